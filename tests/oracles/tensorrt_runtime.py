"""Stands in for TensorRT's runtime and a CUDA stream: records what is executed, refuses what their protocol forbids.

- An execution has every input's shape, every tensor's address, a profile and enough aligned scratch memory.
- It is on the stream of the step, and its shapes are within its profile.
- Nothing of a context changes, and it is not let go of, while work that it enqueued may still run.
- An engine outlives its contexts.

Work is computed when it is enqueued, but counts as running until the stream is waited for, as on a GPU at its slowest.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
STREAM = 77
Shape = tuple[int, ...]
Compute = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class ProtocolError(Exception):
    """What TensorRT's documentation forbids."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise ProtocolError(what)


@dataclass
class Network:
    """What a plan's bytes stand for. inputs and outputs: shape with -1, and dtype. Profiles bound each -1 alike."""

    name: str
    inputs: Mapping[str, tuple[Shape, torch.dtype]]
    outputs: Mapping[str, tuple[Shape, torch.dtype]]
    compute: Compute
    profiles: tuple[tuple[int, int], ...] = ((1, 1 << 20),)
    scratch: int = 0


@dataclass(frozen=True)
class Execution:
    network: str
    context: int
    """Of a context: counts up as they are made."""
    addresses: Mapping[str, int]
    scratch: int
    captured: bool


def tensor_at(address: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


class Device:
    """plan_device.Device without a device."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.completed = 0
        self.waits = 0
        self._graph: list[Callable[[], None]] | None = None

    def stream(self) -> int:
        return STREAM

    def capturing(self) -> bool:
        return self._graph is not None

    def mark(self) -> Mark:
        require(not self.capturing(), "an event for the host is recorded inside a capture")
        return Mark(self, self.enqueued)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        whole = torch.empty(num_bytes + 256, dtype=torch.uint8)
        skip = -whole.data_ptr() % 256
        return whole[skip : skip + num_bytes]

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        step()
        self.finish()
        graph: list[Callable[[], None]] = []
        self._graph = graph
        try:
            found = step()
        finally:
            self._graph = None

        def replay() -> None:
            for launch in graph:
                launch()
            self.enqueued += 1

        return replay, found

    def enqueue(self, launch: Callable[[], None]) -> int:
        """When it has completed, `completed` is at least what this returns."""
        if self._graph is not None:
            self._graph.append(launch)
            return 0
        launch()
        self.enqueued += 1
        return self.enqueued

    def finish(self) -> None:
        self.completed = self.enqueued


@dataclass(frozen=True)
class Mark:
    device: Device
    place: int

    def done(self) -> bool:
        return self.device.completed >= self.place

    def wait(self) -> None:
        require(not self.device.capturing(), "the host waits inside a capture")
        self.device.waits += not self.done()
        self.device.completed = max(self.device.completed, self.place)


@dataclass
class Recorder:
    """`trt`: what Api.trt is. log, name, version and scratch_bytes: as Api's."""

    device: Device
    networks: dict[bytes, Network] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)
    """(context, name of a tensor) of each address that was set."""
    broken: list[str] = field(default_factory=list)
    """Of destructors, which cannot raise."""
    num_contexts: int = 0
    refuse: bool = False
    """Executions fail."""
    name = "stand-in"
    version = "1.0"

    def __post_init__(self) -> None:
        self.log = _Log()
        self.trt = _Trt(self)

    def scratch_bytes(self, engine: Engine) -> int:
        return engine.network.scratch


class _Log:
    def __init__(self) -> None:
        self.errors: list[str] = []


class _Trt:
    class ExecutionContextAllocationStrategy(enum.Enum):
        STATIC = 0
        ON_PROFILE_CHANGE = 1
        USER_MANAGED = 2

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def Runtime(self, log: _Log) -> _Runtime:
        return _Runtime(self._recorder, log)


class _Runtime:
    def __init__(self, recorder: Recorder, log: _Log) -> None:
        self._recorder = recorder
        self._log = log

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        network = self._recorder.networks.get(data)
        if network is None:
            self._log.errors.append("the engine plan file is not compatible with this GPU")
            return None
        return Engine(self._recorder, network)


class Engine:
    def __init__(self, recorder: Recorder, network: Network) -> None:
        self.network = network
        self._recorder = recorder
        self._contexts: weakref.WeakSet[ExecutionContext] = weakref.WeakSet()

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.network.profiles)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[Shape]:
        shape, _ = self.network.inputs[name]
        least, most = self.network.profiles[index]
        return [tuple(n if d < 0 else d for d in shape) for n in (least, least, most)]

    def create_execution_context(self, strategy: Any) -> ExecutionContext:
        require(strategy.name == "USER_MANAGED", "a context allocates memory of its own")
        context = ExecutionContext(self, self._recorder)
        self._contexts.add(context)
        return context

    def __del__(self) -> None:
        if self._contexts:
            self._recorder.broken.append(f"{self.network.name}: the engine went before its contexts")


class ExecutionContext:
    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        recorder.num_contexts += 1
        self.number = recorder.num_contexts
        self._network = engine.network
        self._recorder = recorder
        self._device = recorder.device
        self._profile: int | None = None
        self._memory: tuple[int, int] | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._last = 0

    def _may_change(self, what: str) -> None:
        running = self._last > self._device.completed
        require(not running, f"{self._network.name}: {what} changes while the context may be running")

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._may_change("the profile")
        require(not self._device.capturing(), "a profile is chosen inside a capture")
        require(stream == STREAM and 0 <= index < len(self._network.profiles), "no such stream or profile")
        self._profile = index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._may_change("the scratch memory")
        require(memory % 256 == 0, "scratch memory is not aligned to 256 bytes")
        self._memory = (memory, size)

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        self._may_change(f"{name}'s shape")
        declared, _ = self._network.inputs[name]
        require(self._profile is not None, "a shape is set before a profile")
        least, most = self._network.profiles[self._profile or 0]
        fits = len(shape) == len(declared) and all(
            n == d or (d < 0 and least <= n <= most) for n, d in zip(shape, declared, strict=True)
        )
        if fits:
            self._shapes[name] = tuple(shape)
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._may_change(f"{name}'s address")
        require(address, f"{name} is at no address")
        require(name in self._network.inputs or name in self._network.outputs, f"there is no {name}")
        self._addresses[name] = address
        self._recorder.told.append((self.number, name))
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._network.inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> Shape:
        if name in self._network.inputs:
            return self._shapes[name]
        shape, _ = self._network.outputs[name]
        return tuple(self._rows() if d < 0 else d for d in shape)

    def _rows(self) -> int:
        for name, (declared, _) in self._network.inputs.items():
            if -1 in declared:
                return self._shapes[name][declared.index(-1)]
        raise ProtocolError("an output's size depends on nothing")

    def execute_async_v3(self, stream: int) -> bool:
        network = self._network
        require(stream == STREAM, "not the step's stream")
        require(not self.infer_shapes(), f"{network.name}: shapes of {self.infer_shapes()} are not set")
        unset = [n for n in (*network.inputs, *network.outputs) if n not in self._addresses]
        require(not unset, f"{network.name}: {unset} have no address")
        require(self._memory is not None and self._memory[1] >= network.scratch, "too little scratch memory")
        assert self._memory is not None
        if self._recorder.refuse:
            return False
        addresses, shapes, scratch = dict(self._addresses), dict(self._shapes), self._memory[0]
        out_shapes = {name: self.get_tensor_shape(name) for name in network.outputs}
        captured = self._device.capturing()

        def launch() -> None:
            self._recorder.executions.append(Execution(network.name, self.number, addresses, scratch, captured))
            given = {n: tensor_at(addresses[n], shapes[n], dtype) for n, (_, dtype) in network.inputs.items()}
            for name, value in network.compute(given).items():
                tensor_at(addresses[name], out_shapes[name], network.outputs[name][1]).copy_(value)

        self._last = self._device.enqueue(launch)
        return True

    def __del__(self) -> None:
        if self._last > self._device.completed:
            self._recorder.broken.append(f"{self._network.name}: a context went while it may be running")
