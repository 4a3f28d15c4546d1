"""The evaluator's reading of each layer, on networks made by hand, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.network_evaluator import NetworkError, NetworkEvaluator
from tests.tensorrt.evaluated import api

X = torch.randn((3, 4, 6), generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)

Make = Callable[[Any, Any, Any], Any]
"""From (network, its input x, tensorrt) to the layer whose output is wanted."""


def network(make: Make, *, dtype: str = "float32") -> Any:
    trt = api().trt
    made = api().create_network(api().create_builder())
    x = made.add_input("x", getattr(trt, dtype), (-1, 4, 6))
    x.set_dimension_name(0, "T")
    layer = make(made, x, trt)
    for i in range(layer.num_outputs):
        layer.get_output(i).name = f"y{i}"
        made.mark_output(layer.get_output(i))
    return made


def evaluate(make: Make, x: torch.Tensor = X, **more: torch.Tensor) -> list[torch.Tensor]:
    found = NetworkEvaluator(api().trt, network(make))({"x": x, **more})
    return [found[name] for name in sorted(found)]


def constant(made: Any, values: Any, dtype: Any) -> Any:
    array = np.asarray(values, dtype=dtype)
    KEPT.append(array)
    return made.add_constant(array.shape, array).get_output(0)


KEPT: list[np.ndarray] = []
"""TensorRT refers to constants, it does not copy them."""


def shuffle(made: Any, x: Any, **attributes: Any) -> Any:
    layer = made.add_shuffle(x)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def gather(made: Any, x: Any, mode: Any, axis: int) -> Any:
    layer = made.add_gather_v2(x, made.add_input("index", api().trt.int32, (2, 2)), mode)
    layer.axis = axis
    return layer


def element(made: Any, x: Any, trt: Any) -> Any:
    layer = made.add_gather_v2(x, constant(made, [[[3] * 6]] * 3, np.int32), trt.GatherMode.ELEMENT)
    layer.axis = 1
    return layer


def fill(made: Any, x: Any, trt: Any) -> Any:
    layer = made.add_fill((1,), trt.FillOperation.LINSPACE, trt.int32)
    layer.set_input(0, constant(made, [5], np.int64))
    layer.set_input(1, constant(made, 3, np.int32))
    layer.set_input(2, constant(made, [2], np.int32))
    return layer


LAYERS: dict[str, tuple[Make, Callable[[], list[torch.Tensor]]]] = {
    "matrix product, transposed": (
        lambda n, x, t: n.add_matrix_multiply(x, t.MatrixOperation.TRANSPOSE, x, t.MatrixOperation.NONE),
        lambda: [X.transpose(1, 2) @ X],
    ),
    "division": (
        lambda n, x, t: n.add_elementwise(x, constant(n, [[[2.0] * 6]], np.float32), t.ElementWiseOperation.DIV),
        lambda: [X / 2],
    ),
    "comparison": (
        lambda n, x, t: n.add_elementwise(x, constant(n, [[[0.0]]], np.float32), t.ElementWiseOperation.GREATER),
        lambda: [X > 0],
    ),
    "unary": (lambda n, x, t: n.add_unary(x, t.UnaryOperation.EXP), lambda: [X.exp()]),
    "activation": (lambda n, x, t: n.add_activation(x, t.ActivationType.SIGMOID), lambda: [X.sigmoid()]),
    "mean, dimension kept": (
        lambda n, x, t: n.add_reduce(x, t.ReduceOperation.AVG, 1 << 2, True), lambda: [X.mean(2, keepdim=True)]
    ),
    "maximum over two": (
        lambda n, x, t: n.add_reduce(x, t.ReduceOperation.MAX, 1 << 0 | 1 << 2, False), lambda: [X.amax((0, 2))]
    ),
    "largest": (
        lambda n, x, t: n.add_topk(x, t.TopKOperation.MAX, 2, 1 << 1),
        lambda: [X.topk(2, dim=1).values, X.topk(2, dim=1).indices.int()],
    ),
    "smallest": (
        lambda n, x, t: n.add_topk(x, t.TopKOperation.MIN, 1, 1 << 2),
        lambda: [X.amin(2, keepdim=True), X.argmin(2, keepdim=True).int()],
    ),
    "elements gathered": (element, lambda: [X[:, 3:4]]),
    "transposed before and after": (
        lambda n, x, t: shuffle(n, x, first_transpose=t.Permutation([0, 2, 1]), reshape_dims=(0, 3, 8),
                                second_transpose=t.Permutation([1, 0, 2])),
        lambda: [X.permute(0, 2, 1).reshape(3, 3, 8).permute(1, 0, 2)],
    ),
    "every other": (
        lambda n, x, t: n.add_slice(constant(n, [list(range(9))], np.float32), (0, 1), (1, 4), (1, 2)),
        lambda: [torch.tensor([[1.0, 3, 5, 7]])],
    ),
    "concatenated, along the default axis": (
        lambda n, x, t: n.add_concatenation([x, x]), lambda: [torch.cat([X, X], dim=0)]
    ),
    "shape": (lambda n, x, t: n.add_shape(x), lambda: [torch.tensor([3, 4, 6])]),
    "counted": (fill, lambda: [torch.tensor([3, 5, 7, 9, 11], dtype=torch.int32)]),
    "cast": (lambda n, x, t: n.add_cast(x, t.bfloat16), lambda: [X.bfloat16()]),
    "selected": (
        lambda n, x, t: n.add_select(constant(n, [[[True], [False], [False], [True]]], bool), x,
                                     constant(n, [[[7.0]]], np.float32)),
        lambda: [torch.where(torch.tensor([True, False, False, True])[None, :, None], X, torch.tensor(7.0))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(LAYERS))
def test_layer(what: str) -> None:
    make, want = LAYERS[what]
    got = evaluate(make)
    assert len(got) == len(want())
    for a, b in zip(got, want(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_slices_gathered() -> None:
    trt = api().trt
    (got,) = evaluate(lambda n, x, t: gather(n, x, trt.GatherMode.DEFAULT, 1), index=INDEX)
    assert torch.equal(got, X[:, INDEX.long()])
    with pytest.raises(NetworkError, match=r"an index is outside \[0, 4\)"):
        evaluate(lambda n, x, t: gather(n, x, trt.GatherMode.DEFAULT, 1), index=INDEX + 2)


def test_float32_computed_in_float64() -> None:
    read = NetworkEvaluator(api().trt, network(LAYERS["unary"][0]), real=torch.float64)
    assert torch.equal(read({"x": X.double()})["y0"], X.double().exp())
    with pytest.raises(NetworkError, match="x is torch.float32, and TensorRT says torch.float64"):
        read({"x": X})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[:, :3], r"x is \(3, 3, 6\), and TensorRT says \(-1, 4, 6\)"),
        (X.double(), "x is torch.float64, and TensorRT says torch.float32"),
        (X[0], r"x is \(4, 6\)"),
    ],
)
def test_wrong_inputs(x: torch.Tensor, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        evaluate(LAYERS["unary"][0], x)


def test_missing_and_unequal_inputs() -> None:
    def add(made: Any, x: Any, trt: Any) -> Any:
        z = made.add_input("z", trt.float32, (-1, 4, 6))
        z.set_dimension_name(0, "T")
        return made.add_elementwise(x, z, trt.ElementWiseOperation.SUM)

    with pytest.raises(NetworkError, match=r"inputs are \['x'\]"):
        evaluate(add)
    with pytest.raises(NetworkError, match="input z: T is 1, and 3 in another input"):
        evaluate(add, z=X[:1])


def test_a_slice_past_the_end() -> None:
    """Its size is computed, so that TensorRT cannot know."""

    def beyond(made: Any, x: Any, trt: Any) -> Any:
        layer = made.add_slice(x, (1, 0, 0), (0, 4, 6), (1, 1, 1))
        layer.set_input(2, made.add_shape(x).get_output(0))
        return layer

    with pytest.raises(NetworkError, match="3 numbers from 1 by 1 of 3"):
        evaluate(beyond)


def test_collectives() -> None:
    def reduced(made: Any, x: Any, trt: Any) -> Any:
        layer = api().add_all_reduce(made, x, 2)
        layer.metadata = METADATA[0]
        return layer

    METADATA = ['{"collective": "all_reduce", "reduce": "sum", "ranks": [0, 1]}']
    read = NetworkEvaluator(api().trt, network(reduced))
    assert torch.equal(read({"x": X}, lambda x: x * 2)["y0"], X * 2)
    with pytest.raises(NetworkError, match="nothing was given that sums over ranks"):
        read({"x": X})
    METADATA[0] = '{"collective": "all_reduce", "reduce": "sum", "ranks": [0, 1, 2]}'
    with pytest.raises(NetworkError, match="over 2 ranks, and its metadata says"):
        NetworkEvaluator(api().trt, network(reduced))
    METADATA[0] = "{}"
    with pytest.raises(NotImplementedError):
        NetworkEvaluator(api().trt, network(reduced))


def test_unknown_layers() -> None:
    with pytest.raises(NotImplementedError, match="layers of type CUMULATIVE"):
        evaluate(lambda n, x, t: n.add_cumulative(
            x, constant(n, 0, np.int32), t.CumulativeOperation.SUM, False, False
        ))  # fmt: skip
