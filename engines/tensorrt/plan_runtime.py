"""Runs plans with TensorRT: the Executor of a NetworkEngine on a GPU.

A plan is deserialised once and serves all layers of its kind, in all layouts that use it. Each layer has an execution
context of its own, so that its weights' addresses are set only once. All contexts share one block of scratch memory,
which is safe for networks on one stream. What is bound to a context is not changed while work that it has enqueued may
still run: a step with other addresses gets a second context, or waits for the first.

This uses only the documented interface of IRuntime, ICudaEngine and IExecutionContext that `tensorrt` 10.14 and 11 and
`tensorrt_rtx` 1.7 have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from splash_engines.tensorrt.engine import Signature
from splash_engines.tensorrt.plan_device import SCRATCH_ALIGN, Device, Mark
from splash_engines.tensorrt.plans import Plan
from splash_engines.trt_api import Api

MAX_CONTEXTS = 2
"""The most contexts of a layer and profile: as many as there are steps in flight."""

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}

Tensors = Mapping[str, torch.Tensor]


class Context:
    """An execution context, and what is bound to it."""

    def __init__(self, context: Any, plan: Plan, profile: int, device: Device, scratch: torch.Tensor) -> None:
        self._context = context
        self._kind = plan.kind
        self._device = device
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._running: Mark | None = None
        # This may copy something on the stream; executions follow on the same stream.
        self._check(context.set_optimization_profile_async(profile, device.stream()), f"profile {profile}")
        context.set_device_memory(scratch.data_ptr(), scratch.nbytes)

    def fits(self, inputs: Tensors, outputs: Tensors) -> bool:
        """Whether these tensors can be bound now: they already are, or nothing that the context enqueued is running."""
        return self.idle() or self._is_bound(inputs, outputs)

    def idle(self) -> bool:
        """Whether nothing that the context has enqueued is running."""
        if self._running is not None and (self._device.capturing() or self._running.done()):
            self._running = None
        return self._running is None

    def wait(self) -> None:
        """Waits until the context is idle."""
        if self._running is not None:
            self._running.wait()
            self._running = None

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        """Binds what is not bound yet, and enqueues an execution."""
        if not self._is_bound(inputs, outputs):
            self._bind(inputs, outputs)
        stream = self._device.stream()
        self._check(self._context.execute_async_v3(stream), "execution")
        # A captured execution does not run now, and the graph has its own copy of the addresses.
        self._running = None if self._device.capturing() else self._device.mark()

    def _is_bound(self, inputs: Tensors, outputs: Tensors) -> bool:
        given = {**inputs, **outputs}
        return (
            self._addresses == {name: tensor.data_ptr() for name, tensor in given.items()}
            and self._shapes == {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        )  # fmt: skip

    def _bind(self, inputs: Tensors, outputs: Tensors) -> None:
        assert self.idle(), f"{self._kind}: bound anew while it may be running"
        for name, tensor in inputs.items():
            shape = tuple(tensor.shape)
            if self._shapes.get(name) != shape:
                self._check(self._context.set_input_shape(name, shape), f"{name}'s shape {shape}")
                self._shapes[name] = shape
        for name, tensor in {**inputs, **outputs}.items():
            assert tensor.is_contiguous(), f"{self._kind}: {name} has gaps"
            if self._addresses.get(name) != tensor.data_ptr():
                self._check(self._context.set_tensor_address(name, tensor.data_ptr()), f"{name}'s address")
                self._addresses[name] = tensor.data_ptr()
        missing = self._context.infer_shapes()
        assert not missing, f"{self._kind}: {', '.join(missing)} not given"
        for name, tensor in outputs.items():
            shape = tuple(self._context.get_tensor_shape(name))
            assert shape == tuple(tensor.shape), f"{self._kind}: {name} is {shape}, and was given {tuple(tensor.shape)}"

    def _check(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._kind}: TensorRT refused {what}")


@dataclass
class _Loaded:
    """A deserialised plan."""

    plan: Plan
    engine: Any
    profiles: list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]
    """For each profile, by input: (least shape, largest shape)."""
    contexts: dict[tuple[int | None, int], list[Context]] = field(default_factory=dict)
    """By (layer, profile)."""

    def profile_for(self, inputs: Tensors) -> int:
        """The first profile that these inputs' shapes fit. ValueError if there is none."""
        for index, bounds in enumerate(self.profiles):
            if all(_within(tuple(tensor.shape), *bounds[name]) for name, tensor in inputs.items()):
                return index
        given = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items() if -1 in self._declared(name))
        raise ValueError(
            f"{self.plan.kind}: {given} is beyond what the plan was built for; build it with a larger "
            "--max-batch-tokens, or serve with a smaller one"
        )

    def _declared(self, name: str) -> tuple[int, ...]:
        return next(shape for declared, shape, _ in self.plan.inputs if declared == name)


def _within(shape: tuple[int, ...], least: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return len(shape) == len(least) and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))


class PlanPool:
    """A rank's deserialised plans, their contexts, and the scratch memory that contexts share.

    read: returns a plan's bytes. Only one stream at a time may use the pool.
    """

    def __init__(self, api: Api, device: Device, read: Callable[[Plan], bytes]) -> None:
        self._api = api
        self._device = device
        self._read = read
        self._runtime = api.trt.Runtime(api.log)
        self._loaded: dict[str, _Loaded] = {}
        self._scratch: torch.Tensor | None = None

    def load(self, plans: Mapping[str, Plan]) -> None:
        """Deserialises plans (by key) that are not loaded yet. Not during a step, since the scratch memory may grow.

        ValueError if TensorRT does not load one of them on this GPU.
        """
        for key, plan in plans.items():
            if key not in self._loaded:
                self._loaded[key] = self._deserialise(plan)
        needed = max((self._api.scratch_bytes(each.engine) for each in self._loaded.values()), default=0)
        if self._scratch is None or needed > self._scratch.nbytes:
            self._forget_contexts()  # they are bound to the old memory
            self._scratch = self._device.scratch(max(needed, SCRATCH_ALIGN))
            assert self._scratch.data_ptr() % SCRATCH_ALIGN == 0

    def run(self, key: str, layer: int | None, inputs: Tensors, outputs: Tensors) -> None:
        loaded = self._loaded[key]
        profile = loaded.profile_for(inputs)
        contexts = loaded.contexts.setdefault((layer, profile), [])
        context = next((c for c in contexts if c.fits(inputs, outputs)), None)
        if context is None and len(contexts) < MAX_CONTEXTS:
            context = self._context(loaded, profile)
            contexts.append(context)
        if context is None:
            context = contexts[0]
            context.wait()
            contexts.append(contexts.pop(0))  # next time, wait for the other one, which was enqueued earlier
        context.run(inputs, outputs)

    def close(self) -> None:
        """Waits for what is running, then frees contexts, engines and memory."""
        self._forget_contexts()
        self._loaded.clear()
        self._scratch = None

    def _forget_contexts(self) -> None:
        for loaded in self._loaded.values():
            for contexts in loaded.contexts.values():
                for context in contexts:
                    context.wait()
            loaded.contexts.clear()

    def _deserialise(self, plan: Plan) -> _Loaded:
        self._api.log.errors.clear()
        engine = self._runtime.deserialize_cuda_engine(self._read(plan))
        if engine is None:
            said = " / ".join(self._api.log.errors) or "it does not say why"
            raise ValueError(
                f"{plan.kind}: {self._api.name} {self._api.version} does not load the plan on this GPU: {said}; build "
                "the engine for it, with the same version (splash-trt build --engine tensorrt --target …)"
            )
        profiles = []
        for index in range(engine.num_optimization_profiles):
            bounds = {}
            for name, _, _ in plan.inputs:
                least, _, most = engine.get_tensor_profile_shape(name, index)
                bounds[name] = (tuple(least), tuple(most))
            profiles.append(bounds)
        return _Loaded(plan, engine, profiles)

    def _context(self, loaded: _Loaded, profile: int) -> Context:
        assert self._scratch is not None
        assert not self._device.capturing(), f"{loaded.plan.kind}: runs for the first time inside a capture"
        strategy = self._api.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = loaded.engine.create_execution_context(strategy)
        if context is None:
            raise RuntimeError(f"{loaded.plan.kind}: TensorRT made no execution context")
        return Context(context, loaded.plan, profile, self._device, self._scratch)


class PlanExecutor:
    """The Executor of one rank's NetworkEngine under one layout. plans: by kind."""

    def __init__(self, pool: PlanPool, plans: Mapping[str, Plan]) -> None:
        self._pool = pool
        self._plans = dict(plans)
        self._signatures = {kind: _signature(plan) for kind, plan in plans.items()}
        self._dtypes = {kind: _dtypes(plan) for kind, plan in plans.items()}
        self._retired = False
        pool.load({plan.key: plan for plan in plans.values()})

    def signature(self, kind: str) -> Signature | None:
        return self._signatures.get(kind)

    def run(self, kind: str, layer: int | None, inputs: Tensors, outputs: Tensors) -> None:
        assert not self._retired, f"{kind}: executed on a set of engines that was swapped out"
        given = {name: tensor.dtype for name, tensor in {**inputs, **outputs}.items()}
        assert given == self._dtypes[kind], f"{kind}: given {given}, takes {self._dtypes[kind]}"
        self._pool.run(self._plans[kind].key, layer, inputs, outputs)

    def activate(self) -> None:
        self._retired = False

    def retire(self) -> None:
        """Nothing may be executed until it is activated again; what was enqueued goes on."""
        self._retired = True


def _signature(plan: Plan) -> Signature:
    outputs = {name: (shape, DTYPES[dtype]) for name, shape, dtype in plan.outputs}
    return Signature(inputs=tuple(name for name, _, _ in plan.inputs), outputs=outputs)


def _dtypes(plan: Plan) -> dict[str, torch.dtype]:
    """The dtypes of a plan's inputs and outputs, by name."""
    return {name: DTYPES[dtype] for name, _, dtype in (*plan.inputs, *plan.outputs)}
