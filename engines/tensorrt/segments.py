"""What each network contains: one of a step's dense segments, once for all layers of a kind, made of operations. Their
reference in plain torch is tests/oracles/torch_segments.py.

T tokens (T_r: of this rank), D hidden, H heads on this rank, L latent, R rope part, W = L + R, C context rows. A
head-cut weight is one input for each block of heads: own and, under FULL residency, others. If ranks' results have to
be summed, the output is called `partial`, and whoever runs the network sums; if the network itself sums, it is `sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splash_engines.tensorrt import operations as ops
from splash_engines.tensorrt.attention import attend_absorbed, attend_expanded
from splash_engines.tensorrt.graph import Graph
from splash_engines.tensorrt.sizes import Shapes, Sizes
from splash_engines.trt_api import Api
from splash_trt.models.config import ModelConfig
from splash_trt.models.family import FAMILIES

INDEX_NORM_EPS = 1e-6  # as in transformers' k_norm, whatever the configuration says
OWN, OTHERS = "own", "others"


class Weights:
    """A segment's weights. A weight becomes an input of the network when it is first asked for."""

    def __init__(self, graph: Graph, shapes: Shapes, sharded: bool) -> None:
        """sharded: as in Sizes."""
        self.sharded = sharded
        self._graph = graph
        self._shapes = {name: (shape, float32) for name, shape, float32 in shapes}
        self._made: dict[str, Any] = {}

    def get(self, name: str, block: str = OWN) -> Any | None:
        """A weight as an input of the network; None if the model, or this rank, has none of it."""
        key = f"{block}.{name}"
        if key not in self._shapes or 0 in self._shapes[key][0]:
            return None
        if key not in self._made:
            shape, float32 = self._shapes[key]
            self._made[key] = self._graph.input(key, shape, "float32" if float32 else None)
        return self._made[key]

    def own(self, name: str) -> Any:
        found = self.get(name)
        assert found is not None, f"this rank has no {name}"
        return found

    def blocks(self, name: str) -> list[Any]:
        """A head-cut tensor's blocks, own first, without those that have no heads."""
        found = (self.get(name, block) for block in (OWN, OTHERS))
        return [tensor for tensor in found if tensor is not None]


def embed(g: Graph, model: ModelConfig, w: Weights) -> None:
    """ids int32 [T], first_id int32 [1] -> partial [T, D]."""
    table = w.get("embed")
    if table is not None:
        ids, first = g.input("ids", ("T",), "int32"), g.input("first_id", (1,), "int32")
        _sum(g, ops.embed(g, ids, table, first))


def attention_in(g: Graph, model: ModelConfig, w: Weights) -> None:
    """hidden [T_r, D], cos and sin float32 [T_r, R / 2] -> q_nope [T_r, H, nope], q_rope [T_r, H, R], rows [T_r, W];
    if the model has an indexer also _index's outputs."""
    rope, latent = model.qk_rope_head_dim, model.kv_lora_rank
    x = g.input("hidden", ("T", model.hidden_size))
    cos, sin = (g.input(name, ("T", rope // 2), "float32") for name in ("cos", "sin"))
    x = ops.rms_norm(g, x, w.own("attn_norm"), model.norm_eps, "attn_norm")
    heads, q_in = w.blocks("q_b"), x
    if model.q_lora_rank and (heads or model.indexer):
        q_in = ops.linear(g, x, w.own("q_a"), w.get("q_a_bias"), "q_a")
        q_in = ops.rms_norm(g, q_in, w.own("q_a_norm"), model.latent_norm_eps, "q_a_norm")
    if heads:
        parts = [ops.expand(g, q_in, block, f"q_b.{block.name.split('.')[0]}") for block in heads]
        q = g.concat(parts, 1)
        g.output("q_nope", g.slice(q, 2, 0, model.qk_nope_head_dim))
        turned = g.slice(q, 2, model.qk_nope_head_dim, model.qk_head_dim)
        g.output("q_rope", ops.apply_rope(g, turned, cos, sin, model.rope.interleaved, "q_rope"))
    row = ops.linear(g, x, w.own("kv_a"), w.get("kv_a_bias"), "kv_a")
    kv = ops.rms_norm(g, g.slice(row, 1, 0, latent), w.own("kv_a_norm"), model.latent_norm_eps, "kv_a_norm")
    key = ops.apply_rope(g, g.slice(row, 1, latent, latent + rope), cos, sin, model.rope.interleaved, "k_rope")
    g.output("rows", g.concat([kv, key], 1))
    if model.indexer:
        _index(g, model, w, x, q_in, cos, sin)


def _index(g: Graph, model: ModelConfig, w: Weights, x: Any, q_in: Any, cos: Any, sin: Any) -> None:
    """Adds outputs index_q [T_r, Hi, di], index_key [T_r, di], index_weight float32 [T_r, Hi]; Hi heads of size di.

    A cache row's score for a query is the sum over heads of weight * ReLU(q . key) (DeepSeek-V3.2-Exp's report,
    equation 1); both of its scales, Hi^-1/2 and di^-1/2, are included in the weight.
    """
    assert model.indexer is not None
    heads, size, rope = model.indexer.num_heads, model.indexer.head_dim, model.qk_rope_head_dim
    interleaved = FAMILIES[model.model_type].indexer_interleaved
    with g.scope("index", operation="indexer"):
        q = ops.expand(g, q_in, w.own("index_q"), "index_q")
        key = ops.linear(g, x, w.own("index_k"), None, "index_k")
        norm, bias = w.own("index_k_norm"), w.own("index_k_norm_bias")
        key = ops.layer_norm(g, key, norm, bias, INDEX_NORM_EPS, "index_k_norm")
        for name, tensor, axis in (("index_q", q, 2), ("index_key", key, 1)):
            turned = ops.apply_rope(g, g.slice(tensor, axis, 0, rope), cos, sin, interleaved, f"{name}_rope")
            rest = [g.slice(tensor, axis, rope, size)] if size > rope else []
            g.output(name, g.concat([turned, *rest], axis))
        weight = g.cast(ops.linear(g, x, w.own("index_weights"), None, "index_weights"), "float32")
        with g.scope("scale", role="of heads and of their size"):
            g.output("index_weight", g.binary("PROD", weight, g.constant([[(heads * size) ** -0.5]], "float32")))


def absorb(g: Graph, model: ModelConfig, w: Weights) -> None:
    """q_nope [n, H, nope], q_rope [n, H, R] -> q [n, H, W]."""
    blocks = w.blocks("w_uk")
    if blocks:
        heads = sum(block.shape[0] for block in blocks)
        q_nope = g.input("q_nope", ("T", heads, model.qk_nope_head_dim))
        q_rope = g.input("q_rope", ("T", heads, model.qk_rope_head_dim))
        g.output("q", g.concat([_by_blocks(g, q_nope, blocks, "absorb", transpose=False), q_rope], 2))


def v_up(g: Graph, model: ModelConfig, w: Weights) -> None:
    """latents float32 [n, H, L] -> values [n, H, v]."""
    blocks = w.blocks("w_uv")
    if blocks:
        heads = sum(block.shape[0] for block in blocks)
        latents = g.cast(g.input("latents", ("T", heads, model.kv_lora_rank), "float32"), g.dtype)
        g.output("values", _by_blocks(g, latents, blocks, "v_up", transpose=True))


def _by_blocks(g: Graph, x: Any, blocks: list[Any], of: str, *, transpose: bool) -> Any:
    parts, first = [], 0
    for block in blocks:
        with g.scope(block.name.split(".")[0]):
            part = g.slice(x, 1, first, first + block.shape[0])
            parts.append(ops.per_head(g, part, block, of, transpose=transpose))
        first += block.shape[0]
    return g.concat(parts, 1)


def expand_kv(g: Graph, model: ModelConfig, w: Weights) -> None:
    """latents [C, L] -> k_nope.own [C, h, nope], v.own [C, h, v], h: the block's heads; and the same for others."""
    if w.blocks("w_uk"):
        latents = g.input("latents", ("C", model.kv_lora_rank))
        for name, out in (("w_uk", "k_nope"), ("w_uv", "v")):
            for block in w.blocks(name):
                of = block.name.split(".")[0]
                g.output(f"{out}.{of}", ops.expand(g, latents, block, f"{out}.{of}"))


def attention_out(g: Graph, model: ModelConfig, w: Weights) -> None:
    """values [T_r, H, v] -> out [T_r, D] if the rank has all heads, else partial (without the bias) or sum."""
    blocks = w.blocks("o")
    if not blocks:
        return
    values = g.input("values", ("T", sum(block.shape[0] for block in blocks), model.v_head_dim))
    total, first = None, 0
    for block in blocks:
        with g.scope(f"o.{block.name.split('.')[0]}", operation="o_proj", weight=block.name):
            heads, size, hidden = block.shape
            x = g.reshape(g.slice(values, 1, first, first + heads), (0, heads * size))
            y = g.matmul(x, g.reshape(block, (heads * size, hidden)))
            total = y if total is None else g.binary("SUM", total, y)
        first += heads
    cut = w.sharded
    if cut and not g.num_ranks:
        g.output("partial", total)
        return
    total = g.sum_over_ranks(total) if cut else total
    bias = w.get("o_bias")
    if bias is not None:
        with g.scope("o_bias", operation="bias"):
            total = g.binary("SUM", total, g.reshape(bias, (1, -1)))
    g.output("sum" if cut else "out", total)


def dense_mlp(g: Graph, model: ModelConfig, w: Weights) -> None:
    """hidden [T, D] -> partial [T, D]."""
    gate_up = w.get("gate_up")
    if gate_up is not None:
        x = _mlp_norm(g, model, w)
        _sum(g, ops.gated_mlp(g, x, gate_up, w.own("down"), "mlp"))


def moe(g: Graph, model: ModelConfig, w: Weights) -> None:
    """hidden [T, D], first_expert int32 [1] -> partial [T, D]; every expert of this rank computes every token."""
    gate_up, shared = w.get("experts.gate_up"), w.get("shared.gate_up")
    if gate_up is None and shared is None:
        return
    x, parts = _mlp_norm(g, model, w), []
    if gate_up is not None:
        choice, weight = _route(g, model, w, x)
        first = g.input("first_expert", (1,), "int32")
        parts.append(ops.dense_experts(g, x, choice, weight, gate_up, w.own("experts.down"), first))
    if shared is not None:
        parts.append(ops.gated_mlp(g, x, shared, w.own("shared.down"), "shared"))
    with g.scope("moe", role="routed and shared experts"):
        _sum(g, parts[0] if len(parts) == 1 else g.binary("SUM", *parts))


def moe_in(g: Graph, model: ModelConfig, w: Weights) -> None:
    """hidden [T, D] -> x [T, D] normed, choice int32 [T, k] and weight float32 [T, k], for plugins/grouped_experts; and
    shared [T, D], this rank's part of the shared experts, if it has one."""
    x = _mlp_norm(g, model, w)
    choice, weight = _route(g, model, w, x)
    shared = w.get("shared.gate_up")
    if shared is not None:
        g.output("shared", ops.gated_mlp(g, x, shared, w.own("shared.down"), "shared"))
    g.output("choice", choice)
    g.output("weight", weight)
    g.output("x", x)


def head(g: Graph, model: ModelConfig, w: Weights) -> None:
    """hidden [T, D] of the wanted positions -> logits float32 [T, V_r]."""
    table = w.get("embed" if model.tied_embeddings else "head")
    if table is not None:
        hidden = g.input("hidden", ("T", model.hidden_size))
        x = ops.rms_norm(g, hidden, w.own("final_norm"), model.norm_eps, "final_norm")
        logits = ops.linear(g, x, table, None, "logits")
        with g.scope("logits", operation="wide"):
            g.output("logits", g.cast(logits, "float32"))


def _mlp_norm(g: Graph, model: ModelConfig, w: Weights) -> Any:
    hidden = g.input("hidden", ("T", model.hidden_size))
    return ops.rms_norm(g, hidden, w.own("mlp_norm"), model.norm_eps, "mlp_norm")


def _route(g: Graph, model: ModelConfig, w: Weights, x: Any) -> tuple[Any, Any]:
    assert model.experts is not None
    return ops.route(g, x, w.own("router"), w.get("router_bias"), model.experts)


def _sum(g: Graph, x: Any) -> None:
    if g.num_ranks:
        g.output("sum", g.sum_over_ranks(x))
    else:
        g.output("partial", x)


SEGMENTS: Mapping[str, Callable[[Graph, ModelConfig, Weights], None]] = {
    "embed": embed,
    "attention_in": attention_in,
    "absorb": absorb,
    "v_up": v_up,
    "expand_kv": expand_kv,
    "attention_out": attention_out,
    "dense_mlp": dense_mlp,
    "moe": moe,
    "moe_in": moe_in,
    "head": head,
}
MOE = ("moe", "moe_in")
ATTEND = ("attend_absorbed", "attend_expanded")


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """How a model's segments become networks.

    dtype: float32 or bfloat16. num_ranks: as in Graph, and only for layouts whose tokens are everywhere.
    """

    api: Api
    builder: Any
    model: ModelConfig
    dtype: str
    num_ranks: int = 0

    def __call__(self, kind: str, sizes: Sizes, heads: int = 0) -> Graph | None:
        """A segment's network; None if a rank of these sizes has nothing to compute in it. heads: for ATTEND only."""
        name = kind if kind not in ATTEND else f"{kind}.{heads}"
        graph = Graph(self.api, self.builder, name, self.dtype, self.num_ranks)
        if kind == "attend_absorbed":
            attend_absorbed(graph, self.model, heads, sizes.page_tokens)
        elif kind == "attend_expanded":
            attend_expanded(graph, self.model, heads)
        else:
            shapes = sizes.moe if kind in MOE else sizes.dense
            SEGMENTS[kind](graph, self.model, Weights(graph, shapes, sizes.sharded))
        return graph if graph.network.num_outputs else None
