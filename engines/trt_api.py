"""One interface to TensorRT's Python packages: `tensorrt` 10.14, `tensorrt` 11 and `tensorrt_rtx` 1.7.

What differs between them is found out here, by looking for names, never by comparing versions:

    what                            tensorrt 10.14     tensorrt 11        tensorrt_rtx 1.7
    NetworkDefinition EXPLICIT_BATCH  wanted           gone               gone
    builds for                      the GPU here       the GPU here       any of a list of compute capabilities, no GPU
    DistCollective layers           no                 yes                yes
    plugin layers, quick plugins    yes                yes                no
    an engine's scratch             device_memory_size, and _v2 in all three

Common to all three, and therefore used without a check: STRONGLY_TYPED, build_serialized_network,
device_memory_size_v2, IProgressMonitor, layer.metadata, and every layer that splash_engines.tensorrt emits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

OLDEST = 80  # for sm_75 TensorRT-RTX has no products in bfloat16 or float32
PACKAGES = ("tensorrt", "tensorrt_rtx")
_CAPABILITY = re.compile(r"SM(\d+)$")
_PART = re.compile(r"[\w.]+(?:/[\w.]+)+")

Progress = Callable[[str, float], None]
"""Called with the name of TensorRT's phase and how much of the build is done, 0 to 1."""


class BuildFailure(RuntimeError):
    """TensorRT could not build a network. `node`: the path of the node that it named as the cause, if any."""

    def __init__(self, network: str, node: str | None, message: str) -> None:
        where = f"{network}: node {node}" if node else network
        super().__init__(f"{where}: {message}")
        self.network = network
        self.node = node


@dataclass(frozen=True, kw_only=True)
class Features:
    """What one installed package can do."""

    explicit_batch_flag: bool
    capability_lists: bool
    """It builds for GPUs that this machine does not have."""
    dist_collective: bool
    plugins: bool


def probe(trt: Any) -> Features:
    """The features of `trt`: the package, or anything with the same names."""
    network = trt.INetworkDefinition
    return Features(
        explicit_batch_flag=hasattr(trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH"),
        capability_lists=hasattr(trt.IBuilderConfig, "set_compute_capability"),
        dist_collective=hasattr(network, "add_dist_collective"),
        plugins=hasattr(network, "add_plugin_v3"),
    )


def capability_name(major: int, minor: int) -> str:
    """sm_89 for (8, 9)."""
    return f"sm_{major}{minor}"


class Api:
    """One of the packages, `trt`. What is the same in all of them is called on `trt` directly."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.name = str(trt.__name__)
        self.version = str(trt.__version__)
        self.features = probe(trt)
        self.log = _logger(trt)

    def targets(self) -> tuple[str, ...]:
        """The GPUs for which our networks can be built on any machine; empty: only for the GPU here."""
        if not self.features.capability_lists:
            return ()
        numbers = [m.group(1) for name in dir(self.trt.ComputeCapability) if (m := _CAPABILITY.match(name))]
        return tuple(f"sm_{number}" for number in sorted(numbers, key=int) if int(number) >= OLDEST)

    def check_targets(self, targets: Sequence[str], gpu: str | None) -> None:
        """ValueError unless networks can be built for all of `targets`. gpu: the one here, such as sm_90."""
        if not targets:
            raise ValueError("target: names no GPU; give one or more, such as --target sm_89,sm_120")
        if self.features.capability_lists:
            known = self.targets()
            for target in targets:
                if target not in known:
                    raise ValueError(
                        f"target: {target} is none that {self.name} {self.version} builds for ({', '.join(known)}); "
                        "for other GPUs build with full TensorRT on a machine that has one"
                    )
        elif tuple(targets) != (gpu,):
            here = gpu or "none"
            raise ValueError(
                f"target: {', '.join(targets)}: {self.name} {self.version} builds for the GPU of this machine only, "
                f"which is {here}; install tensorrt-rtx-cu13 to build for others, or build where one is"
            )

    def create_builder(self) -> Any:
        return self.trt.Builder(self.log)

    def create_network(self, builder: Any) -> Any:
        """An empty network in which tensors keep the types that they are given (strongly typed)."""
        flags = self.trt.NetworkDefinitionCreationFlag
        bits = 1 << int(flags.STRONGLY_TYPED)
        if self.features.explicit_batch_flag:
            bits |= 1 << int(flags.EXPLICIT_BATCH)
        return builder.create_network(bits)

    def create_config(self, builder: Any, targets: Sequence[str]) -> Any:
        config = builder.create_builder_config()
        config.clear_flag(self.trt.BuilderFlag.TF32)  # float32 networks are for comparisons, and need all bits
        if self.features.capability_lists:
            config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets):
                name = target.replace("sm_", "SM")
                config.set_compute_capability(getattr(self.trt.ComputeCapability, name), index)
        return config

    def build(self, builder: Any, network: Any, config: Any, progress: Progress | None = None) -> bytes:
        """The serialised engine. BuildFailure names the network, and the node if TensorRT named one.

        An exception from `progress` ends the build at TensorRT's next step and is raised here. Not to be called on the
        main thread: its bindings print and lose a KeyboardInterrupt that comes while TensorRT calls a Python function.
        """
        self.log.errors.clear()
        monitor = _monitor(self.trt, progress or (lambda phase, done: None))
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
        if monitor.error is not None:
            raise monitor.error
        if plan is None:
            raise self.failure(network.name)
        return bytes(plan)

    def failure(self, network: str) -> BuildFailure:
        """An exception for what has just gone wrong, from TensorRT's own messages."""
        message = " / ".join(self.log.errors) or "refused without a message"
        named = [part for error in self.log.errors for part in _PART.findall(error)]
        ours = [part for part in named if not part.startswith(("_src/", "src/")) and "." not in part.split("/")[-1]]
        return BuildFailure(network, ours[0] if ours else None, message)

    def add_all_reduce(self, network: Any, tensor: Any, num_ranks: int) -> Any:
        """Adds a layer that sums `tensor` over ranks 0 … num_ranks - 1."""
        if not self.features.dist_collective:
            raise ValueError(
                f"collectives: {self.name} {self.version} has no DistCollective layers; build with collectives at the "
                "segments' borders, or with tensorrt 11"
            )
        kind, ranks = self.trt.CollectiveOperation.ALL_REDUCE, np.arange(num_ranks, dtype=np.int64)
        layer = network.add_dist_collective(tensor, kind, self.trt.ReduceOperation.SUM, -1, ranks)
        layer.num_ranks = num_ranks
        return layer

    def scratch_bytes(self, engine: Any) -> int:
        """Bytes of scratch memory that an execution context needs."""
        return int(engine.device_memory_size_v2)


def load_api(gpu: str | None, targets: Sequence[str]) -> Api:
    """Full TensorRT if it is installed and builds for `targets`, else TensorRT-RTX.

    gpu: the GPU here, such as sm_90; None: there is none. Raises ValueError with a remedy if neither can.
    """
    found: list[Api] = []
    for name in PACKAGES:
        module = _import(name)
        if module is not None:
            found.append(Api(module))
    if not found:
        raise ValueError(
            "engine: neither tensorrt nor tensorrt_rtx is installed; pip install 'splash-trt[rtx]' brings TensorRT-RTX"
            ", which builds on any machine (docs/tensorrt.md)"
        )
    problems = []
    for api in found:
        try:
            api.check_targets(targets, gpu)
        except ValueError as error:
            problems.append(str(error))
        else:
            return api
    raise ValueError(problems[-1])


def _import(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except (ImportError, OSError):  # OSError if its libraries do not load
        return None


def _logger(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Keeps errors, for the exception that will report them; prints nothing."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            # On a machine without a GPU, a builder also complains about that after every error.
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR) and "cudaError 35" not in message:
                self.errors.append(message)

    return Log()


def _monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Reports progress. Phases are nested and may differ in length: a phase counts as one step of its parent."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, tuple[float, float, int]] = {}
            self.done = 0.0
            self.error: BaseException | None = None

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            begin, share, count = self.phases.get(parent or "", (0.0, 1.0, 1))
            self.phases[name] = (max(begin, self.done), share / max(1, count), steps)

        def step_complete(self, name: str, step: int) -> bool:
            begin, share, count = self.phases.get(name, (self.done, 0.0, 1))
            self.done = max(self.done, min(1.0, begin + share * (step + 1) / max(1, count)))
            if self.error is None:
                try:
                    progress(name, self.done)
                except BaseException as error:  # no exception may propagate through TensorRT's own frames
                    self.error = error
            return self.error is None

        def phase_finish(self, name: str) -> None:
            self.phases.pop(name, None)

    return Monitor()
