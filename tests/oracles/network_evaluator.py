"""Executes a TensorRT network with torch, layer by layer, from what TensorRT itself reports of it.

It knows nothing of how the network was made: only tensorrt's or tensorrt_rtx's INetworkDefinition, whose layers are
read back through their classes. So it is a second reading of the network beside the one that wrote it. Every tensor is
held against the type and the shape that TensorRT inferred for it, and every rule that TensorRT has and torch has not
(equal types, equal ranks, no slice past the end) is checked.

Traps: a layer's `type` must be read before its class is changed, since IActivationLayer.type is something else.
DistCollective layers do not tell their operation; it is read from their metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Operation = Callable[[Tensors], Tensors]
AllReduce = Callable[[torch.Tensor], torch.Tensor]

_CLASSES = {
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "UNARY": "IUnaryLayer",
    "ACTIVATION": "IActivationLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "REDUCE": "IReduceLayer",
    "TOPK": "ITopKLayer",
    "GATHER": "IGatherLayer",
    "SELECT": "ISelectLayer",
    "CONCATENATION": "IConcatenationLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "SHAPE": "IShapeLayer",
    "FILL": "IFillLayer",
    "CAST": "ICastLayer",
    "CONSTANT": "IConstantLayer",
    "IDENTITY": "IIdentityLayer",
    "DIST_COLLECTIVE": "IDistCollectiveLayer",
}

_ELEMENTWISE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": torch.div,
    "POW": torch.pow,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}
_UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "NOT": torch.logical_not,
    "ISINF": torch.isinf,
    "ISNAN": torch.isnan,
}
_ACTIVATION: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SIGMOID": torch.sigmoid,
    "RELU": torch.relu,
    "TANH": torch.tanh,
}


class NetworkError(AssertionError):
    """The network, or what it was given, is not what TensorRT would accept or reported."""


@dataclass(frozen=True)
class _Value:
    """A tensor as TensorRT reports it; -1 in shape: any size."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    names: tuple[str, ...]
    """Of its dimensions, empty where they have none; equal names mean equal sizes."""

    def check(self, tensor: torch.Tensor, where: str) -> None:
        if tensor.dtype != self.dtype:
            raise NetworkError(f"{where}: {self.name} is {tensor.dtype}, and TensorRT says {self.dtype}")
        same = len(tensor.shape) == len(self.shape)
        if not same or any(want not in (-1, got) for got, want in zip(tensor.shape, self.shape, strict=True)):
            raise NetworkError(f"{where}: {self.name} is {tuple(tensor.shape)}, and TensorRT says {self.shape}")


@dataclass(frozen=True)
class _Step:
    path: str
    run: Operation
    inputs: tuple[str, ...]
    outputs: tuple[_Value, ...]


class NetworkEvaluator:
    """`trt`: the package that made `network`, which is read once, here.

    real: what FLOAT tensors are computed in; with float64 a float32 network is computed as if it had no rounding.
    all_reduce: the sum over ranks for DistCollective layers. plugins: what computes plugin layers, by their names.
    """

    def __init__(
        self,
        trt: Any,
        network: Any,
        *,
        real: torch.dtype = torch.float32,
        plugins: Mapping[str, Operation] | None = None,
    ) -> None:
        self.trt = trt
        self.real = real
        self._plugins = dict(plugins or {})
        self._all_reduce: AllReduce | None = None
        self.inputs = {v.name: v for v in (self._value(network.get_input(i)) for i in range(network.num_inputs))}
        outputs = (self._value(network.get_output(i)) for i in range(network.num_outputs))
        self.outputs = {v.name: v for v in outputs}
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        self._steps = self._ordered([self._step(layer) for layer in layers])

    def __call__(
        self, inputs: Mapping[str, torch.Tensor], all_reduce: AllReduce | None = None
    ) -> dict[str, torch.Tensor]:
        """The outputs by name. NetworkError names the layer or the input that is not as TensorRT says."""
        if sorted(inputs) != sorted(self.inputs):
            raise NetworkError(f"inputs are {sorted(inputs)}, and the network's {sorted(self.inputs)}")
        sizes: dict[str, int] = {}
        for name, value in self.inputs.items():
            value.check(inputs[name], "input")
            for size, dim in zip(inputs[name].shape, value.names, strict=True):
                if dim and sizes.setdefault(dim, size) != size:
                    raise NetworkError(f"input {name}: {dim} is {size}, and {sizes[dim]} in another input")
        tensors = dict(inputs)
        self._all_reduce = all_reduce
        for step in self._steps:
            found = step.run([tensors[name] for name in step.inputs])
            for value, tensor in zip(step.outputs, found, strict=True):
                value.check(tensor, step.path)
                tensors[value.name] = tensor
        return {name: tensors[name] for name in self.outputs}

    # Reading the network

    def _dtype(self, dtype: Any) -> torch.dtype:
        kinds = {
            "FLOAT": self.real,
            "BF16": torch.bfloat16,
            "HALF": torch.float16,
            "INT32": torch.int32,
            "INT64": torch.int64,
            "BOOL": torch.bool,
        }
        return kinds[dtype.name]

    def _value(self, tensor: Any) -> _Value:
        shape = tuple(tensor.shape)
        names: tuple[str, ...] = ()
        if tensor.is_network_input:
            names = tuple(tensor.get_dimension_name(axis) or "" for axis in range(len(shape)))
        return _Value(tensor.name, self._dtype(tensor.dtype), shape, names)

    def _step(self, layer: Any) -> _Step:
        kind = layer.type.name
        tensors = [layer.get_input(i) for i in range(layer.num_inputs)]
        outputs = tuple(self._value(layer.get_output(i)) for i in range(layer.num_outputs))
        if kind.startswith("PLUGIN"):
            run = self._plugins[layer.name]
        elif kind not in _CLASSES:
            raise NotImplementedError(f"{layer.name}: layers of type {kind}")
        else:
            layer.__class__ = getattr(self.trt, _CLASSES[kind])
            run = getattr(self, f"_{kind.lower()}")(layer, outputs)
        return _Step(layer.name, run, tuple(t.name for t in tensors if t is not None), outputs)

    @staticmethod
    def _ordered(steps: list[_Step]) -> list[_Step]:
        """Producers first: layers are told in the order they were made, which need not be one to run them in."""
        made = {value.name: step for step in steps for value in step.outputs}
        done: dict[int, None] = {}
        order: list[_Step] = []

        def visit(step: _Step) -> None:
            if id(step) in done:
                return
            done[id(step)] = None
            for name in step.inputs:
                if name in made:
                    visit(made[name])
            order.append(step)

        for step in steps:
            visit(step)
        return order

    # One method for each type of layer: what it does, from its attributes

    def _constant(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        value = torch.from_numpy(layer.weights.copy()).reshape(tuple(layer.shape)).to(outputs[0].dtype)
        return lambda x: [value]

    def _cast(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        dtype = self._dtype(layer.to_type)
        return lambda x: [x[0].to(dtype)]

    def _identity(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        return lambda x: [x[0]]

    def _matrix_multiply(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        kinds = self.trt.MatrixOperation
        turned = []
        for kind in (layer.op0, layer.op1):
            if kind not in (kinds.NONE, kinds.TRANSPOSE):
                raise NotImplementedError(f"{layer.name}: {kind}")
            turned.append(kind == kinds.TRANSPOSE)

        def run(x: Tensors) -> Tensors:
            a, b = (t.transpose(-1, -2) if turn else t for t, turn in zip(x, turned, strict=True))
            _alike(layer.name, a, b)
            return [torch.matmul(a, b)]

        return run

    def _elementwise(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        function, name = _ELEMENTWISE[layer.op.name], layer.name

        def run(x: Tensors) -> Tensors:
            _alike(name, *x)
            return [function(x[0], x[1])]

        return run

    def _unary(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        function = _UNARY[layer.op.name]
        return lambda x: [function(x[0])]

    def _activation(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        function = _ACTIVATION[layer.type.name]
        return lambda x: [function(x[0])]

    def _softmax(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        (axis,) = _axes(layer.axes)
        return lambda x: [torch.softmax(x[0], dim=axis)]

    def _reduce(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        axes, keep, kind = _axes(layer.axes), layer.keep_dims, layer.op.name
        functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "SUM": lambda x: x.sum(dim=axes, keepdim=keep),
            "AVG": lambda x: x.mean(dim=axes, keepdim=keep),
            "MAX": lambda x: x.amax(dim=axes, keepdim=keep),
            "MIN": lambda x: x.amin(dim=axes, keepdim=keep),
        }
        function = functions[kind]
        return lambda x: [function(x[0])]

    def _topk(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        (axis,), k, largest = _axes(layer.axes), layer.k, layer.op == self.trt.TopKOperation.MAX

        def run(x: Tensors) -> Tensors:
            values, index = torch.topk(x[0], k, dim=axis, largest=largest)
            return [values, index.to(torch.int32)]

        return run

    def _gather(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        axis, kinds, name = layer.axis, self.trt.GatherMode, layer.name
        if layer.mode == kinds.ELEMENT:
            return lambda x: [torch.gather(x[0], axis, x[1].long())]
        if layer.mode != kinds.DEFAULT or layer.num_elementwise_dims:
            raise NotImplementedError(f"{name}: {layer.mode}")

        def run(x: Tensors) -> Tensors:
            data, index = x
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < data.shape[axis]:
                raise NetworkError(f"{name}: an index is outside [0, {data.shape[axis]})")
            shape = (*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])
            return [data.index_select(axis, index.reshape(-1).long()).reshape(shape)]

        return run

    def _select(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        def run(x: Tensors) -> Tensors:
            condition, then, otherwise = x
            _alike(layer.name, then, otherwise)
            if condition.dim() != then.dim():
                raise NetworkError(f"{layer.name}: a condition of rank {condition.dim()} for {then.dim()}")
            return [torch.where(condition, then, otherwise)]

        return run

    def _concatenation(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        axis = layer.axis

        def run(x: Tensors) -> Tensors:
            _alike(layer.name, *x)
            return [torch.cat(list(x), dim=axis)]

        return run

    def _shuffle(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        if layer.num_inputs > 1:
            raise NotImplementedError(f"{layer.name}: a shape that is computed")
        rank = len(layer.get_input(0).shape)
        first = list(layer.first_transpose)[:rank]
        dims, zero = layer.reshape_dims, layer.zero_is_placeholder
        second = list(layer.second_transpose)[: len(outputs[0].shape)]

        def run(x: Tensors) -> Tensors:
            y = x[0].permute(first)
            if dims is not None:
                y = y.reshape([y.shape[i] if size == 0 and zero else size for i, size in enumerate(dims)])
            return [y.permute(second)]

        return run

    def _slice(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        if layer.mode != self.trt.SampleMode.STRICT_BOUNDS:
            raise NotImplementedError(f"{layer.name}: {layer.mode}")
        given = [layer.get_input(i) for i in range(layer.num_inputs)]
        computed = [t is not None for t in given] + [False] * 4
        if computed[1] or computed[3]:
            raise NotImplementedError(f"{layer.name}: a begin or a stride that is computed")
        start, stride = tuple(layer.start), tuple(layer.stride)
        fixed = () if computed[2] else tuple(layer.shape)
        name = layer.name

        def run(x: Tensors) -> Tensors:
            sizes = fixed or tuple(x[1].tolist())
            whole = []
            for begin, size, step, limit in zip(start, sizes, stride, x[0].shape, strict=True):
                if size and not 0 <= begin + (size - 1) * step < limit:
                    raise NetworkError(f"{name}: {size} numbers from {begin} by {step} of {limit}")
                whole.append(slice(begin, begin + (size - 1) * step + 1 if size else begin, step))
            return [x[0][tuple(whole)]]

        return run

    def _shape(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        return lambda x: [torch.tensor(x[0].shape, dtype=torch.int64)]

    def _fill(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        if layer.operation != self.trt.FillOperation.LINSPACE or layer.num_inputs != 3:
            raise NotImplementedError(f"{layer.name}: {layer.operation}")
        dtype = outputs[0].dtype

        def run(x: Tensors) -> Tensors:
            (size,), begin, (step,) = x[0].tolist(), x[1].item(), x[2].tolist()
            return [begin + step * torch.arange(size, dtype=dtype)]

        return run

    def _dist_collective(self, layer: Any, outputs: Sequence[_Value]) -> Operation:
        told = json.loads(layer.metadata)
        if (told.get("collective"), told.get("reduce")) != ("all_reduce", "sum"):
            raise NotImplementedError(f"{layer.name}: {layer.metadata}")
        if layer.num_ranks != len(told["ranks"]):
            raise NetworkError(f"{layer.name}: over {layer.num_ranks} ranks, and its metadata says {told['ranks']}")

        def run(x: Tensors) -> Tensors:
            if self._all_reduce is None:
                raise NetworkError(f"{layer.name}: nothing was given that sums over ranks")
            return [self._all_reduce(x[0].contiguous())]

        return run


def _axes(mask: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(8) if mask >> axis & 1)


def _alike(name: str, *tensors: torch.Tensor) -> None:
    """TensorRT neither converts types nor adds dimensions."""
    if len({t.dtype for t in tensors}) > 1:
        raise NetworkError(f"{name}: types {[t.dtype for t in tensors]}")
    if len({t.dim() for t in tensors}) > 1:
        raise NetworkError(f"{name}: ranks {[t.dim() for t in tensors]}")
