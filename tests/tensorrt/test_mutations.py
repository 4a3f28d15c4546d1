"""The comparison of networks with plain torch can fail: planted defects, each of which it must find.

Three kinds: another model is lowered than is run, a finished network is edited through TensorRT's own interface, and
right networks are bound to wrong tensors. A defect is found if TensorRT or the evaluator refuses the network, or if
the segment that it is in, and no other, computes something clearly different. Every case first agrees without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from splash_engines.tensorrt.engine import NetworkEngine
from splash_engines.tensorrt.graph import Graph
from splash_engines.tensorrt.segments import Lowering
from splash_engines.tensorrt.sizes import Sizes
from splash_trt.config import Layout
from splash_trt.models.config import Experts, GroupScore, ModelConfig, Scoring
from tests.layouts.harness import Models
from tests.oracles.network_evaluator import NetworkError
from tests.tensorrt.evaluated import Attend, Networks, api
from tests.tensorrt.segments_harness import Rank, worst

AGREES = 2e-7
MARGIN = 1e-3  # four orders above what a right network may differ by, in units of the numbers' size

Plant = Callable[[Networks, pytest.MonkeyPatch], None]
Edit = Callable[["Nodes"], None]


@dataclass(frozen=True, kw_only=True)
class Defect:
    """segments: where it must show, and nowhere else."""

    segments: tuple[str, ...] = ()
    refused: str = ""
    """What is said where the network does not even run, and so no segment shows it."""
    plant: Plant
    name: str = "v3_base"
    layout: Layout = Layout.DP
    size: int = 2
    experts: str = "moe"
    dtype: torch.dtype = torch.float64
    collectives_in: bool = False
    square: bool = False
    """The model's nope part is as wide as its latent, so that a transposed weight fits."""


# Another model


def lowered(change: Callable[[ModelConfig], ModelConfig]) -> Plant:
    def plant(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
        def lower(lowering: Lowering, kind: str, sizes: Sizes, heads: int) -> Graph | None:
            return dataclasses.replace(lowering, model=change(lowering.model))(kind, sizes, heads)

        networks.lower = lower

    return plant


def unchanged(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def told(**changes: Any) -> Plant:
    return lowered(lambda model: dataclasses.replace(model, **changes))


def experts(**changes: Any) -> Plant:
    def change(model: ModelConfig) -> ModelConfig:
        assert isinstance(model.experts, Experts)
        return dataclasses.replace(model, experts=dataclasses.replace(model.experts, **changes))

    return lowered(change)


def flipped_rope(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, rope=dataclasses.replace(model.rope, interleaved=not model.rope.interleaved))


# An edited network


class Nodes:
    """A network's layers by the ends of their paths, with their own classes."""

    CLASSES = {
        "ELEMENTWISE": "IElementWiseLayer", "REDUCE": "IReduceLayer", "ACTIVATION": "IActivationLayer",
        "TOPK": "ITopKLayer", "SLICE": "ISliceLayer", "CONSTANT": "IConstantLayer", "CAST": "ICastLayer",
        "MATRIX_MULTIPLY": "IMatrixMultiplyLayer", "SHUFFLE": "IShuffleLayer", "UNARY": "IUnaryLayer",
    }  # fmt: skip

    def __init__(self, graph: Graph) -> None:
        self.trt = api().trt
        self.kept = graph.kept
        self._layers = [graph.network.get_layer(i) for i in range(graph.network.num_layers)]

    def __getitem__(self, end: str) -> Any:
        found = [layer for layer in self._layers if layer.name == end or layer.name.endswith("/" + end)]
        assert len(found) == 1, (end, [layer.name for layer in self._layers])
        name = self.CLASSES.get(found[0].type.name)
        if name is not None:
            found[0].__class__ = getattr(self.trt, name)
        return found[0]

    def out(self, end: str) -> Any:
        return self[end].get_output(0)


def edited(kind: str, edit: Edit) -> Plant:
    def plant(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
        done = []

        def every(lowered_kind: str, graph: Graph) -> None:
            if lowered_kind == kind:
                edit(Nodes(graph))
                done.append(graph)

        networks.edit = every

    return plant


def put(end: str, attribute: str, value: Callable[[Any], Any]) -> Edit:
    """Set an attribute of a layer; value: made from tensorrt's names."""
    return lambda nodes: setattr(nodes[end], attribute, value(nodes.trt))


def wire(end: str, index: int, source: str) -> Edit:
    """Take a layer's input from another layer."""
    return lambda nodes: nodes[end].set_input(index, nodes.out(source))


def swap(end: str) -> Edit:
    def edit(nodes: Nodes) -> None:
        layer = nodes[end]
        first, second = layer.get_input(0), layer.get_input(1)
        layer.set_input(0, second)
        layer.set_input(1, first)

    return edit


def shifted(end: str, by: float) -> Edit:
    """Another number in a constant."""

    def edit(nodes: Nodes) -> None:
        layer = nodes[end]
        values = np.asarray(layer.weights + by, dtype=layer.weights.dtype)
        nodes.kept.append(values)
        layer.weights = values

    return edit


def up_before_gate(nodes: Nodes) -> None:
    gate, up = nodes["mlp/silu_mul/slice"], nodes["mlp/silu_mul/slice.2"]
    gate.start, up.start = tuple(up.start), tuple(gate.start)


# Wrong bindings


def bound(change: Callable[[dict[str, torch.Tensor], str, NetworkEngine], None]) -> Plant:
    """change: called with a segment's weights by their names in the network."""

    def plant(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
        right = NetworkEngine._weights

        def weights(self: NetworkEngine, kind: str, layer: int | None, signature: Any) -> dict[str, torch.Tensor]:
            found = dict(right(self, kind, layer, signature))
            change(found, kind, self)
            return found

        monkeypatch.setattr(NetworkEngine, "_weights", weights)

    return plant


def swap_blocks(tensor: str) -> Plant:
    def change(found: dict[str, torch.Tensor], kind: str, engine: NetworkEngine) -> None:
        if f"own.{tensor}" in found:
            own, others = f"own.{tensor}", f"others.{tensor}"
            found[own], found[others] = found[others], found[own]

    return bound(change)


def other_layer(found: dict[str, torch.Tensor], kind: str, engine: NetworkEngine) -> None:
    if "own.kv_a_norm" in found:
        found["own.kv_a_norm"] = engine._blocks["own"]["layers.0.kv_a_norm"]


def other_norm(found: dict[str, torch.Tensor], kind: str, engine: NetworkEngine) -> None:
    if kind == "head":
        found["own.final_norm"] = engine._blocks["own"]["layers.0.attn_norm"]


def first_number(field: str, by: int) -> Plant:
    """The rank takes its shard for another one."""

    def plant(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
        right = NetworkEngine.__init__

        def made(self: NetworkEngine, *arguments: Any) -> None:
            right(self, *arguments)
            setattr(self, field, getattr(self, field) + by)

        monkeypatch.setattr(NetworkEngine, "__init__", made)

    return plant


def next_layer_rows(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Attend._network

    def network(self: Attend, kind: str, heads: int, page_tokens: int) -> Any:
        found = right(self, kind, heads, page_tokens)
        shift = {"first_row": page_tokens}
        return lambda inputs: found({name: tensor - shift.get(name, 0) for name, tensor in inputs.items()})

    monkeypatch.setattr(Attend, "_network", network)


def without_sums(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "sum_over_ranks", lambda self, x: x)


def narrow_input(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents come in float32, and the network is told that they do not."""
    right = Graph.input
    monkeypatch.setattr(
        Graph, "input", lambda self, name, shape, dtype=None: right(
            self, name, shape, None if self.segment == "v_up" else dtype
        )
    )  # fmt: skip


ATTEND = ("attend_absorbed", "attend_expanded")
MOE = ("mlp.moe",)
BFLOAT16 = torch.bfloat16

DEFECTS: dict[str, Defect] = {
    "softmax scale": Defect(segments=ATTEND, plant=told(softmax_scale=0.2)),
    "rope style": Defect(segments=("attention_in",), plant=lowered(flipped_rope)),
    "half-split rope taken for interleaved": Defect(
        segments=("attention_in",), plant=lowered(flipped_rope), name="v3_half_rope"
    ),
    "the model's epsilon in latent norms": Defect(segments=("attention_in",), plant=told(latent_norm_eps=0.3)),
    "weights not normalised": Defect(segments=MOE, plant=experts(normalize=False)),
    "weights normalised without being asked": Defect(
        segments=MOE, plant=experts(normalize=True), name="v3_half_rope", experts="moe_in"
    ),
    "routed scaling factor": Defect(segments=MOE, plant=experts(scale=1.0), experts="moe_in"),
    "a group scored by its best expert": Defect(segments=MOE, plant=experts(group_score=GroupScore.MAX)),
    "groups not limited": Defect(segments=MOE, plant=experts(num_groups=1, top_groups=1)),
    "one group too many": Defect(segments=MOE, plant=experts(top_groups=3), experts="moe_in"),
    "softmax scores": Defect(segments=MOE, plant=experts(scoring=Scoring.SOFTMAX)),
    "an expert too few": Defect(segments=MOE, plant=experts(top_k=1)),
    "correction bias in the weights": Defect(
        segments=MOE, plant=edited("moe", wire("choose/gather_elements", 0, "route/bias/sum"))
    ),
    "gate and up swapped": Defect(segments=("mlp.dense",), plant=edited("dense_mlp", up_before_gate)),
    "silu without its factor": Defect(
        segments=("mlp.dense",), plant=edited("dense_mlp", wire("mlp/silu_mul/prod.2", 0, "silu_mul/sigmoid"))
    ),
    "another activation": Defect(
        segments=("mlp.dense",),
        plant=edited("dense_mlp", put("silu_mul/sigmoid", "type", lambda trt: trt.ActivationType.TANH)),
    ),
    "a sum for a mean in a norm": Defect(
        segments=("head",),
        plant=edited("head", put("final_norm/reduce_avg", "op", lambda trt: trt.ReduceOperation.SUM)),
    ),
    "a norm left out": Defect(
        segments=("attention_in",), plant=edited("attention_in", wire("attention_in/concat.2", 0, "slice.3"))
    ),
    "keys not rotated": Defect(
        segments=("attention_in",), plant=edited("attention_in", wire("attention_in/concat.2", 1, "slice.4"))
    ),
    "rotated the other way": Defect(
        segments=("attention_in",), plant=edited("attention_in", swap("q_rope/sub"))
    ),
    "heads of own and others swapped": Defect(
        segments=("attention_in",), plant=edited("attention_in", swap("attention_in/concat"))
    ),
    "own heads projected twice": Defect(
        segments=("attention_out",),
        plant=edited("attention_out", wire("o.others/sum", 1, "o.own/matmul")),
    ),
    "a weight transposed": Defect(
        segments=("absorb",),
        plant=edited("absorb", put("own/absorb/matmul", "op1", lambda trt: trt.MatrixOperation.TRANSPOSE)),
        square=True,
    ),
    "heads and tokens not turned back": Defect(
        refused="Sizes of tensors must match",
        plant=edited("v_up", put("own/v_up/transpose.2", "first_transpose", lambda trt: trt.Permutation([0, 1, 2]))),
    ),
    "the last row of a context hidden": Defect(
        segments=("attend_absorbed",), plant=edited("attend_absorbed", shifted("mask/iota/constant.2", 1))
    ),
    "the next token seen": Defect(
        segments=("attend_expanded",), plant=edited("attend_expanded", shifted("mask/iota/constant.2", -1))
    ),
    "a mask the other way": Defect(segments=("attend_expanded",), plant=edited("attend_expanded", swap("greater"))),
    "pages of one layer only": Defect(
        segments=("attend_absorbed",), plant=edited("attend_absorbed", shifted("rows/constant.2", -4))
    ),
    "stale rows kept": Defect(
        segments=("attend_absorbed",),
        plant=edited("attend_absorbed", wire("mask/select", 2, "rows/gather")),
    ),
    "a type of fewer bits": Defect(
        refused="head: .* and the network's torch.float16",
        plant=edited("head", put("logits/cast", "to_type", lambda trt: trt.DataType.HALF)),
        dtype=BFLOAT16,
    ),
    "an input of another type": Defect(
        refused="input: latents is torch.float32, and TensorRT says", plant=narrow_input, dtype=BFLOAT16
    ),
    "own and others bound the wrong way": Defect(segments=("absorb", "expand_kv"), plant=swap_blocks("w_uk")),
    "own and others bound the wrong way at the end": Defect(segments=("attention_out",), plant=swap_blocks("o")),
    "another layer's weights": Defect(segments=("attention_in",), plant=bound(other_layer)),
    "another norm's weights": Defect(segments=("head",), plant=bound(other_norm)),
    "the next rank's vocabulary": Defect(segments=("embed",), plant=first_number("_first_id", 1)),
    "the next rank's experts": Defect(segments=MOE, plant=first_number("_first_expert", -1)),
    "another layer's rows of the pool": Defect(segments=("attend_absorbed",), plant=next_layer_rows),
    "no sum over ranks": Defect(
        segments=("embed", "attention_out", "mlp.dense", "mlp.moe"), plant=without_sums, layout=Layout.TP,
        collectives_in=True,
    ),
}  # fmt: skip


def model_of(models: Models, defect: Defect) -> ModelConfig:
    model = models.config(defect.name)
    return dataclasses.replace(model, qk_nope_head_dim=model.kv_lora_rank) if defect.square else model


def compare(models: Models, defect: Defect, networks: Networks) -> dict[str, float]:
    dtype = str(defect.dtype).removeprefix("torch.")
    return worst(Rank(model_of(models, defect), defect.layout, defect.size - 1, defect.size, dtype, networks))


def fresh(models: Models, defect: Defect) -> Networks:
    model = model_of(models, defect)
    return Networks(model, defect.dtype, experts=defect.experts, collectives_in=defect.collectives_in)


@pytest.fixture(scope="module")
def clean(models: Models) -> Callable[[Defect], None]:
    """Holds that a case agrees without its defect, once for all cases that share it."""
    done: set[Defect] = set()

    def check(defect: Defect) -> None:
        key = dataclasses.replace(defect, plant=unchanged, segments=(), refused="")
        if key not in done:
            found = compare(models, defect, fresh(models, defect))
            limit = AGREES if defect.dtype is torch.float64 else 0.05
            assert all(d < limit for name, d in found.items() if limit == AGREES or name != "mlp.moe"), found
            done.add(key)

    return check


@pytest.mark.parametrize("what", list(DEFECTS))
def test_planted_defect_is_found(
    models: Models, clean: Callable[[Defect], None], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    defect = DEFECTS[what]
    clean(defect)
    networks = fresh(models, defect)
    defect.plant(networks, monkeypatch)
    if defect.refused:
        with pytest.raises((NetworkError, RuntimeError), match=defect.refused):
            compare(models, defect, networks)
        return
    found = compare(models, defect, networks)
    assert {name for name, d in found.items() if d > MARGIN} == set(defect.segments), found
    assert all(d < AGREES for name, d in found.items() if name not in defect.segments), found
