"""What plugins/mla_attention computes, made of primitives, for small models and for networks that contain attention.

H heads, L latent, R rope part, W = L + R; n queries, C context rows. Computed in float32, as the plugin's sums are.
"""

from __future__ import annotations

import math
from typing import Any

from splash_engines.tensorrt.graph import Graph
from splash_engines.tensorrt.operations import WIDE
from splash_trt.models.config import ModelConfig

LOWEST = -3e38
"""Below every score, but finite: -inf - -inf would be NaN."""


def attend_absorbed(g: Graph, model: ModelConfig, heads: int, page_tokens: int) -> None:
    """Attention of absorbed queries to the latent rows in their pages.

    Inputs: q [n, H, W]; pool [rows, W], all layers of all pages; first_row int32 [1], where the layer's rows begin
    inside a page; tables int32 [n, U], each query's pages in order; length int32 [n], its context. Outputs: out float32
    [n, H, L], lse [n, H].
    """
    width, latent = model.row_width, model.kv_lora_rank
    q = g.input("q", ("n", heads, width))
    pool = g.input("pool", ("rows", width))
    first_row = g.input("first_row", (1,), "int32")
    tables = g.input("tables", ("n", "U"), "int32")
    length = g.input("length", ("n",), "int32")
    with g.scope("rows", operation="gather_pages", page_tokens=page_tokens):
        page = g.binary("MAX", tables, g.constant([[0]], "int32"))  # unused entries are -1
        rows_of_page = g.constant([[model.num_layers * page_tokens]], "int32")
        first = g.binary("SUM", g.binary("PROD", page, rows_of_page), g.reshape(first_row, (1, 1)))
        inside = g.constant([[list(range(page_tokens))]], "int32")
        index = g.reshape(g.binary("SUM", g.reshape(first, (0, 0, 1)), inside), (0, -1))  # [n, C]
        rows = g.cast(g.gather(pool, index, 0), WIDE)
    with g.scope("mask", role="rows past a query's context do not count"):
        seen = g.binary("LESS", g.reshape(g.iota(index, 1), (1, -1)), g.reshape(length, (-1, 1)))  # [n, C]
        # Rows past the context may be NaN, which a weight of zero would not cancel.
        rows = g.select(g.reshape(seen, (0, 0, 1)), rows, g.constant([[[0.0]]], WIDE))
    with g.scope("scores", operation="mla_decode", scale=model.softmax_scale):
        scores = g.matmul(g.cast(q, WIDE), rows, transpose_b=True)
        scores = g.binary("PROD", scores, g.constant([[[model.softmax_scale]]], WIDE))
        scores = g.select(g.reshape(seen, (0, 1, -1)), scores, g.constant([[[-math.inf]]], WIDE))
    weight, total, lse = _softmax(g, scores)
    with g.scope("values", operation="mla_decode"):
        out = g.binary("DIV", g.matmul(weight, g.slice(rows, 2, 0, latent)), total)
    g.output("out", out)
    g.output("lse", lse)


def attend_expanded(g: Graph, model: ModelConfig, heads: int) -> None:
    """Causal attention of one request's queries to a block of its up-projected context.

    Inputs: q_nope [n, H, nope], q_rope [n, H, R], q_position int32 [n], k_nope [C, H, nope], k_rope [C, R],
    v [C, H, v], first_key int32 [1]. Outputs: out float32 [n, H, v], lse [n, H].
    """
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    q_nope = g.input("q_nope", ("n", heads, nope))
    q_rope = g.input("q_rope", ("n", heads, rope))
    position = g.input("q_position", ("n",), "int32")
    k_nope = g.input("k_nope", ("C", heads, nope))
    k_rope = g.input("k_rope", ("C", rope))
    v = g.input("v", ("C", heads, value))
    first_key = g.input("first_key", (1,), "int32")
    with g.scope("scores", operation="mla_prefill", scale=model.softmax_scale):
        by_head = g.transpose(g.cast(q_nope, WIDE), (1, 0, 2))  # [H, n, nope]
        scores = g.matmul(by_head, g.transpose(g.cast(k_nope, WIDE), (1, 0, 2)), transpose_b=True)
        shared = g.reshape(g.cast(k_rope, WIDE), (1, -1, rope))
        turned = g.matmul(g.transpose(g.cast(q_rope, WIDE), (1, 0, 2)), shared, transpose_b=True)
        scores = g.binary("PROD", g.binary("SUM", scores, turned), g.constant([[[model.softmax_scale]]], WIDE))
    with g.scope("mask", role="a query sees keys up to its own position"):
        key = g.binary("SUM", g.iota(k_rope, 0), first_key)
        later = g.binary("GREATER", g.reshape(key, (1, 1, -1)), g.reshape(position, (1, -1, 1)))  # [1, n, C]
        scores = g.select(later, g.constant([[[-math.inf]]], WIDE), scores)
    weight, total, lse = _softmax(g, scores)
    with g.scope("values", operation="mla_prefill"):
        out = g.binary("DIV", g.matmul(weight, g.transpose(g.cast(v, WIDE), (1, 0, 2))), total)
        out = g.transpose(out, (1, 0, 2))
    g.output("out", out)
    g.output("lse", g.transpose(lse, (1, 0)))


def _softmax(g: Graph, scores: Any) -> tuple[Any, Any, Any]:
    """scores [a, b, C] -> weights [a, b, C], not yet divided by their sums; the sums [a, b, 1]; log-sum-exps [a, b]."""
    with g.scope("softmax", role="a query that sees nothing gets zeros and -inf"):
        top = g.reduce("MAX", scores, 2, keep=True)
        shift = g.binary("MAX", top, g.constant([[[LOWEST]]], WIDE))
        weight = g.unary("EXP", g.binary("SUB", scores, shift))
        total = g.reduce("SUM", weight, 2, keep=True)
        lse = g.binary("SUM", g.unary("LOG", total), shift)
        lse = g.reshape(lse, (0, 0))
        return weight, g.binary("MAX", total, g.constant([[[1e-30]]], WIDE)), lse
