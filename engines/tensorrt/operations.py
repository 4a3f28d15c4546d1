"""The operations of splash_engines.ops made of primitives that every TensorRT has, with the same names and meanings.

Tensors are graph.Graph's. T tokens, D hidden, H heads, R rope part, E experts. As in ops, norms, rotations, routing and
activations are computed in float32, products in the graph's dtype.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from splash_engines.tensorrt.graph import Graph
from splash_trt.models.config import Experts, GroupScore, Scoring

WIDE = "float32"


def rms_norm(g: Graph, x: Any, weight: Any, eps: float, of: str) -> Any:
    """x [T, n], weight [n]."""
    with g.scope(of, operation="rms_norm", eps=eps):
        y = g.cast(x, WIDE)
        mean = g.reduce("AVG", g.binary("PROD", y, y), 1, keep=True)
        root = g.unary("SQRT", g.binary("SUM", mean, g.constant([[eps]], WIDE)))
        return g.binary("PROD", g.cast(g.binary("DIV", y, root), g.dtype), g.reshape(weight, (1, -1)))


def layer_norm(g: Graph, x: Any, weight: Any, bias: Any, eps: float, of: str) -> Any:
    """x [T, n], weight and bias [n] (arXiv 1607.06450)."""
    with g.scope(of, operation="layer_norm", eps=eps):
        y = g.cast(x, WIDE)
        y = g.binary("SUB", y, g.reduce("AVG", y, 1, keep=True))
        variance = g.reduce("AVG", g.binary("PROD", y, y), 1, keep=True)
        root = g.unary("SQRT", g.binary("SUM", variance, g.constant([[eps]], WIDE)))
        y = g.binary("PROD", g.cast(g.binary("DIV", y, root), g.dtype), g.reshape(weight, (1, -1)))
        return g.binary("SUM", y, g.reshape(bias, (1, -1)))


def linear(g: Graph, x: Any, weight: Any, bias: Any | None, of: str) -> Any:
    """x [T, n], weight [m, n], bias [m] -> [T, m]."""
    with g.scope(of, operation="linear", weight=weight.name):
        y = g.matmul(x, weight, transpose_b=True)
        return y if bias is None else g.binary("SUM", y, g.reshape(bias, (1, -1)))


def apply_rope(g: Graph, x: Any, cos: Any, sin: Any, interleaved: bool, of: str) -> Any:
    """Rotate x [T, R] or [T, H, R] by float32 cos and sin [T, R / 2]."""
    with g.scope(of, operation="apply_rope", pairs="interleaved" if interleaved else "halves"):
        axis, size = len(x.shape) - 1, x.shape[-1]
        if axis == 2:
            cos, sin = g.reshape(cos, (0, 1, -1)), g.reshape(sin, (0, 1, -1))
        y = g.cast(x, WIDE)
        if interleaved:
            a, b = g.slice(y, axis, 0, size, 2), g.slice(y, axis, 1, size, 2)
        else:
            a, b = g.slice(y, axis, 0, size // 2), g.slice(y, axis, size // 2, size)
        first = g.binary("SUB", g.binary("PROD", a, cos), g.binary("PROD", b, sin))
        second = g.binary("SUM", g.binary("PROD", a, sin), g.binary("PROD", b, cos))
        if not interleaved:
            return g.cast(g.concat([first, second], axis), g.dtype)
        keep = (0,) * axis
        pairs = [g.reshape(part, (*keep, size // 2, 1)) for part in (first, second)]
        return g.cast(g.reshape(g.concat(pairs, axis + 1), (*keep, size)), g.dtype)


def embed(g: Graph, ids: Any, table: Any, first_id: Any) -> Any:
    """ids int32 [T], table [V_r, D], first_id int32 [1] -> [T, D], zeros where the id is another rank's."""
    with g.scope("embed", operation="embed"):
        rows = table.shape[0]
        local = g.binary("SUB", ids, first_id)
        last = g.constant([rows - 1], "int32")
        zero = g.constant([0], "int32")
        inside = g.binary("MIN", g.binary("MAX", local, zero), last)
        here = g.reshape(g.binary("EQUAL", local, inside), (-1, 1))
        return g.select(here, g.gather(table, inside, 0), g.cast(g.constant([[0.0]], WIDE), g.dtype))


def per_head(g: Graph, x: Any, weight: Any, of: str, *, transpose: bool) -> Any:
    """x [T, H, k] times each head's weight [H, k, n], or [H, n, k] transposed -> [T, H, n]."""
    with g.scope(of, operation=of, weight=weight.name):
        y = g.matmul(g.transpose(x, (1, 0, 2)), weight, transpose_b=transpose)
        return g.transpose(y, (1, 0, 2))


def expand(g: Graph, latents: Any, weight: Any, of: str) -> Any:
    """latents [C, L], weight [H, d, L] -> [C, H, d]."""
    with g.scope(of, operation="expand", weight=weight.name):
        heads, size, latent = weight.shape
        y = g.matmul(latents, g.reshape(weight, (heads * size, latent)), transpose_b=True)
        return g.reshape(y, (0, heads, size))


def silu_mul(g: Graph, both: Any, axis: int) -> Any:
    """[..., 2 I] with the gate first -> [..., I]."""
    size = both.shape[axis] // 2
    with g.scope("silu_mul", operation="silu_mul", first="gate"):
        gate, up = g.slice(both, axis, 0, size), g.slice(both, axis, size, 2 * size)
        wide = g.cast(gate, WIDE)
        return g.binary("PROD", g.cast(g.binary("PROD", wide, g.sigmoid(wide)), g.dtype), up)


def gated_mlp(g: Graph, x: Any, gate_up: Any, down: Any, of: str) -> Any:
    """x [T, D], gate_up [2, I, D], down [D, I] -> [T, D]."""
    with g.scope(of, operation="gated_mlp"):
        hidden = x.shape[1]
        both = linear(g, x, g.reshape(gate_up, (-1, hidden)), None, "gate_up")
        return linear(g, silu_mul(g, both, 1), down, None, "down")


def route(g: Graph, x: Any, router: Any, bias: Any | None, config: Experts) -> tuple[Any, Any]:
    """x [T, D], router [E, D] -> (choice int32 [T, k], weight float32 [T, k])."""
    with g.scope("route", operation="route", top_k=config.top_k, scoring=config.scoring.value):
        logits = linear(g, g.cast(x, WIDE), g.cast(router, WIDE), None, "scores")
        sigmoid = config.scoring is Scoring.SIGMOID
        scores = g.sigmoid(logits) if sigmoid else g.softmax(logits, 1)
        ranking = scores
        if bias is not None:
            with g.scope("bias", role="decides who is chosen, not the weights"):
                ranking = g.binary("SUM", scores, g.reshape(bias, (1, -1)))
        if config.num_groups > 1:
            ranking = _limit_groups(g, ranking, config)
        with g.scope("choose", role="the chosen experts"):
            choice = g.topk(ranking, config.top_k, 1)[1]
            weight = g.gather_elements(scores, choice, 1)
        if config.normalize:
            with g.scope("normalize", role="weights sum to one"):
                total = g.binary("SUM", g.reduce("SUM", weight, 1, keep=True), g.constant([[1e-20]], WIDE))
                weight = g.binary("DIV", weight, total)
        with g.scope("scale", role="routed_scaling_factor", scale=config.scale):
            return choice, g.binary("PROD", weight, g.constant([[config.scale]], WIDE))


def _limit_groups(g: Graph, ranking: Any, config: Experts) -> Any:
    """ranking [T, E] with -inf for the experts that are not in the best groups."""
    with g.scope("groups", role="only the best groups' experts", groups=config.num_groups, kept=config.top_groups):
        experts = ranking.shape[1]
        grouped = g.reshape(ranking, (0, config.num_groups, experts // config.num_groups))
        if config.group_score is GroupScore.TOP2_SUM:
            score = g.reduce("SUM", g.topk(grouped, 2, 2)[0], 2)
        else:
            score = g.reduce("MAX", grouped, 2)
        best = g.topk(score, config.top_groups, 1)[1]
        kept = _hits(g, best, g.constant([[list(range(config.num_groups))]], "int32"))
        counts = g.reduce("SUM", kept, 1)  # [T, groups], 0 or 1
        inside = g.reshape(g.binary("GREATER", counts, g.constant([[0.5]], WIDE)), (0, 0, 1))
        limited = g.select(inside, grouped, g.constant([[[-math.inf]]], WIDE))
        return g.reshape(limited, (0, experts))


def _hits(g: Graph, choice: Any, ids: Any) -> Any:
    """choice int32 [T, k], ids int32 [1, 1, n] -> float32 [T, k, n], 1 where they are equal."""
    return g.cast(g.binary("EQUAL", g.reshape(choice, (0, 0, 1)), ids), WIDE)


def dense_experts(g: Graph, x: Any, choice: Any, weight: Any, gate_up: Any, down: Any, first_expert: Any) -> Any:
    """What plugins/grouped_experts computes, for small models: every expert of this rank computes every token.

    x [T, D], choice int32 [T, k], weight float32 [T, k], gate_up [E_r, 2 I, D], down [E_r, D, I], first_expert int32
    [1] -> [T, D].
    """
    with g.scope("experts", operation="grouped_experts", form="dense"):
        count, _, hidden = gate_up.shape
        ids = g.binary("SUM", g.constant([[np.arange(count)]], "int32"), g.reshape(first_expert, (1, 1, 1)))
        shares = g.binary("PROD", _hits(g, choice, ids), g.reshape(weight, (0, 0, 1)))
        share = g.transpose(g.reshape(g.reduce("SUM", shares, 1), (0, 0, 1)), (1, 0, 2))  # [E_r, T, 1]
        with g.scope("gate_up", operation="linear", weight=gate_up.name):
            both = g.matmul(g.reshape(x, (1, -1, hidden)), gate_up, transpose_b=True)
        with g.scope("down", operation="linear", weight=down.name):
            y = g.matmul(silu_mul(g, both, 2), down, transpose_b=True)
        return g.cast(g.reduce("SUM", g.binary("PROD", g.cast(y, WIDE), share), 0), g.dtype)
