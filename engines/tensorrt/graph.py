"""Makes the nodes of one network, each with a path, a meaning and an entry in the network's fingerprint.

A node's name is its path, segment/operation/…/primitive; its metadata is JSON that says what it is for. Shapes are
TensorRT's own: -1 is a dimension that varies within the bounds of a profile, and dimensions of the same name (T, C, …)
are equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from splash_engines.manifest import checksum
from splash_engines.trt_api import Api, BuildFailure

Dim = int | str
_NUMPY = {"float32": np.float32, "int32": np.int32, "int64": np.int64}


class Graph:
    """A network that is being made. dtype: that of the model's products, float32 or bfloat16."""

    def __init__(self, api: Api, builder: Any, segment: str, dtype: str, num_ranks: int = 0) -> None:
        """num_ranks: sums over this many ranks are DistCollective layers; 0: whoever runs the network sums."""
        self.api = api
        self.trt = api.trt
        self.network = api.create_network(builder)
        self.network.name = segment
        self.segment = segment
        self.dtype = dtype
        self.num_ranks = num_ranks
        self._path: list[str] = [segment]
        self._meaning: list[dict[str, Any]] = [{"segment": segment}]
        self._names: Counter[str] = Counter()
        self._record: list[Any] = []
        self.kept: list[np.ndarray] = []
        """The constants' arrays, which have to exist until TensorRT builds the network."""

    @property
    def fingerprint(self) -> str:
        """A checksum of everything that defines the network: nodes, attributes, constants, names, inputs, outputs."""
        text = json.dumps([self.segment, self._record], separators=(",", ":"))
        return checksum(text.encode())

    @contextmanager
    def scope(self, name: str, **meaning: Any) -> Iterator[None]:
        """Nodes that are made inside have `name` in their path and `meaning` in their metadata, besides what enclosing
        scopes add."""
        self._path.append(name)
        self._meaning.append({**self._meaning[-1], **meaning})
        try:
            yield
        finally:
            self._path.pop()
            self._meaning.pop()

    # Inputs and outputs

    def input(self, name: str, shape: Sequence[Dim], dtype: str | None = None) -> Any:
        """An input, bound by its address when the network runs. A dimension given by a name varies from run to run."""
        sizes = tuple(-1 if isinstance(dim, str) else dim for dim in shape)
        tensor = self.network.add_input(name, self._dtype(dtype or self.dtype), sizes)
        for axis, dim in enumerate(shape):
            if isinstance(dim, str):
                tensor.set_dimension_name(axis, dim)
        self._record.append(["input", name, list(shape), dtype or self.dtype])
        return tensor

    def output(self, name: str, tensor: Any) -> None:
        if tensor.is_network_input:
            tensor = self._node("identity", "add_identity", tensor)
        tensor.name = name
        self.network.mark_output(tensor)
        self._record.append(["output", name])

    # Primitives

    def constant(self, values: Any, dtype: str) -> Any:
        array = np.asarray(values, dtype=_NUMPY[dtype], order="C")
        self.kept.append(array)
        return self._node("constant", "add_constant", array.shape, array)

    def cast(self, x: Any, dtype: str) -> Any:
        target = self._dtype(dtype)
        return x if x.dtype == target else self._node("cast", "add_cast", x, target)

    def matmul(self, a: Any, b: Any, *, transpose_b: bool = False) -> Any:
        """a [..., m, k] times b [..., k, n] (or [..., n, k] transposed); leading dimensions of 1 are broadcast."""
        kinds = self.trt.MatrixOperation
        return self._node(
            "matmul", "add_matrix_multiply", a, kinds.NONE, b, kinds.TRANSPOSE if transpose_b else kinds.NONE
        )

    def binary(self, operation: str, a: Any, b: Any) -> Any:
        """operation: a name of ElementWiseOperation. a and b have as many dimensions; those of 1 are broadcast."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._node(operation.lower(), "add_elementwise", a, b, kind)

    def unary(self, operation: str, x: Any) -> Any:
        return self._node(operation.lower(), "add_unary", x, getattr(self.trt.UnaryOperation, operation))

    def sigmoid(self, x: Any) -> Any:
        return self._node("sigmoid", "add_activation", x, self.trt.ActivationType.SIGMOID)

    def softmax(self, x: Any, axis: int) -> Any:
        return self._node("softmax", "add_softmax", x, set={"axes": 1 << axis})

    def reduce(self, operation: str, x: Any, axis: int, *, keep: bool = False) -> Any:
        kind = getattr(self.trt.ReduceOperation, operation)
        return self._node(f"reduce_{operation.lower()}", "add_reduce", x, kind, 1 << axis, keep)

    def topk(self, x: Any, k: int, axis: int) -> tuple[Any, Any]:
        """(values, int32 indices) of the k largest along an axis, the largest first."""
        return self._node("topk", "add_topk", x, self.trt.TopKOperation.MAX, k, 1 << axis, outputs=2)

    def gather(self, x: Any, index: Any, axis: int) -> Any:
        """x's slices along `axis` at `index`; the dimensions of index replace the axis in the result."""
        return self._node("gather", "add_gather", x, index, axis)

    def gather_elements(self, x: Any, index: Any, axis: int) -> Any:
        """out[i, j] = x[i, index[i, j]] for axis 1; likewise for others."""
        return self._node(
            "gather_elements", "add_gather_v2", x, index, self.trt.GatherMode.ELEMENT, set={"axis": axis}
        )

    def select(self, condition: Any, then: Any, otherwise: Any) -> Any:
        return self._node("select", "add_select", condition, then, otherwise)

    def concat(self, parts: Sequence[Any], axis: int) -> Any:
        if len(parts) == 1:
            return parts[0]
        return self._node("concat", "add_concatenation", list(parts), set={"axis": axis})

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """A 0 in `shape` keeps the input's dimension there; one -1 is whatever is left."""
        return self._node("reshape", "add_shuffle", x, set={"reshape_dims": tuple(shape)})

    def transpose(self, x: Any, order: Sequence[int]) -> Any:
        return self._node("transpose", "add_shuffle", x, set={"first_transpose": self.trt.Permutation(list(order))})

    def slice(self, x: Any, axis: int, begin: int, end: int, step: int = 1) -> Any:
        """x[..., begin:end:step, ...] along `axis`, whose size must not vary; all of the other axes."""
        shape = list(x.shape)
        if begin == 0 and end == shape[axis] and step == 1:
            return x
        shape[axis] = -(-(end - begin) // step)
        start = [0] * len(shape)
        start[axis] = begin
        stride = [1] * len(shape)
        stride[axis] = step
        if -1 not in shape:
            return self._node("slice", "add_slice", x, tuple(start), tuple(shape), tuple(stride))
        sizes = self.shape_of(x, {axis: shape[axis]})
        static = tuple(max(0, size) for size in shape)
        return self._node("slice", "add_slice", x, tuple(start), static, tuple(stride), inputs={2: sizes})

    def shape_of(self, x: Any, changes: dict[int, int]) -> Any:
        """x's shape as a tensor, int64 [number of dimensions]; changes: sizes to put in place of x's, by axis."""
        with self.scope("shape"):
            whole = self._node("shape", "add_shape", x)
            parts = []
            for axis, size in enumerate(x.shape):
                size = changes.get(axis, size)
                if size >= 0:
                    parts.append(self.constant([size], "int64"))
                else:
                    parts.append(self.gather(whole, self.constant([axis], "int64"), 0))
            return self.concat(parts, 0)

    def iota(self, x: Any, axis: int) -> Any:
        """0, 1, … up to the size of x along `axis`, exclusive: int32 [that size]."""
        with self.scope("iota"):
            size = self.gather(self._node("shape", "add_shape", x), self.constant([axis], "int64"), 0)
            inputs = {0: size, 1: self.constant(0, "int32"), 2: self.constant([1], "int32")}
            kind = self.trt.FillOperation.LINSPACE
            return self._node("fill", "add_fill", (1,), kind, self._dtype("int32"), inputs=inputs)

    def sum_over_ranks(self, x: Any) -> Any:
        """x summed over all ranks. Only if num_ranks is not 0."""
        with self.scope("all_reduce", collective="all_reduce", reduce="sum", ranks=list(range(self.num_ranks))):
            return self._node("dist_collective", "", x, self.num_ranks)

    def _dtype(self, name: str) -> Any:
        return getattr(self.trt, name)

    def _node(
        self,
        primitive: str,
        method: str,
        *arguments: Any,
        set: dict[str, Any] | None = None,
        inputs: dict[int, Any] | None = None,
        outputs: int = 1,
    ) -> Any:
        """Adds a layer and returns its output, or a tuple of several. BuildFailure, with the path, if TensorRT refuses.

        method: of the network, called with the arguments; empty: a sum over ranks. set: the layer's attributes; inputs:
        by index.
        """
        path = "/".join([*self._path, primitive])
        self._names[path] += 1
        if self._names[path] > 1:
            path += f".{self._names[path]}"
        self.api.log.errors.clear()
        try:
            if method:
                layer = getattr(self.network, method)(*arguments)
            else:
                layer = self.api.add_all_reduce(self.network, *arguments)
            if layer is None:
                raise RuntimeError("no layer was made")
            layer.name = path
            layer.metadata = json.dumps({**self._meaning[-1], "primitive": primitive})
            for name, value in (set or {}).items():
                setattr(layer, name, value)
            for index, tensor in (inputs or {}).items():
                layer.set_input(index, tensor)
            found = [layer.get_output(i) for i in range(outputs)]
            for i, tensor in enumerate(found):
                tensor.name = path if i == 0 else f"{path}:{i}"
                _ = tuple(tensor.shape)  # TensorRT infers shapes when asked; errors of a later time would name no node
        except (RuntimeError, TypeError, ValueError) as error:
            if self.api.log.errors or not isinstance(error, ValueError):
                why = " / ".join(self.api.log.errors) or str(error)
                raise BuildFailure(self.segment, path, why) from error
            raise
        self._record.append([
            path, layer.metadata, method, [_plain(a) for a in arguments],
            {k: _plain(v) for k, v in (set or {}).items()}, {k: _plain(v) for k, v in (inputs or {}).items()},
        ])  # fmt: skip
        return found[0] if outputs == 1 else tuple(found)


def _plain(value: Any) -> Any:
    """A value that JSON can hold, different for different values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    name = getattr(value, "name", None)
    if isinstance(name, str):  # a tensor, or a member of an enumeration
        return name
    return [int(v) for v in value]  # a permutation
