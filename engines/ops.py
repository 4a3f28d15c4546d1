"""The coarse operations that a model's segments are made of, as references in plain torch.

TensorRT's lowering (tensorrt/operations.py) implements the same operations under these names; it and the GPU kernels
have to agree with the functions here.
T tokens, D hidden, H heads on this rank, L KV latent, R rope part, W = L + R, Q query latent, V_r rows of the
vocabulary on this rank. Norms, rotations, routing and activations are computed in float32 or wider, products in the
tensors' own dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from splash_trt.models.config import Experts, GroupScore, Rope, Scoring
from splash_trt.runtime.noise import GAMMA, mix64


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] / sqrt(mean(x²) + eps) * weight [n] (arXiv 1910.07467)."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rope_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Each pair's radians per position, [dim / 2] float64; stretched as YaRN (arXiv 2309.00071) if the model asks."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    plain = rope.theta ** (-2 * pair / dim)
    yarn = rope.yarn
    if yarn is None:
        return plain

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` full turns over the original context."""
        return dim * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    stretched = ((pair - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain * (1 - stretched) + plain / yarn.factor * stretched


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [T, R / 2] in `dtype` (float32 or wider), times `factor` (YaRN's attention factor)."""
    angle = positions.to(torch.float64)[:, None] * frequencies
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates x [T, R] or [T, H, R] by cos, sin [T, R / 2]. Pairs are numbers (2i, 2i + 1) if interleaved, else
    (i, i + R / 2), in the result too."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    y = wide(x)
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = y.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return rotated.to(x.dtype)


def embed(ids: torch.Tensor, table: torch.Tensor, first_id: int) -> torch.Tensor:
    """ids [T] of the whole vocabulary, table [V_r, D] of this rank -> [T, D], zeros where the id is another rank's."""
    local = ids - first_id
    here = (local >= 0) & (local < table.shape[0])
    out = table.new_zeros((len(ids), table.shape[1]))
    out[here] = table[local[here]]
    return out


def absorb(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """q_nope [T, H, nope], w_uk [H, nope, L] -> [T, H, L]: queries whose products with latents are scores."""
    return torch.einsum("thn,hnl->thl", q_nope, w_uk)


def v_up(latents: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """latents [T, H, L], w_uv [H, v, L] -> [T, H, v]."""
    return torch.einsum("thl,hvl->thv", latents, w_uv)


def expand(latents: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """latents [C, L], w [H, d, L] (w_uk or w_uv) -> out [C, H, d], which is contiguous."""
    heads, dim, latent = w.shape
    torch.mm(latents, w.reshape(heads * dim, latent).t(), out=out.view(len(latents), heads * dim))


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [T, D], gate_up [2, I, D], down [D, I] -> [T, D]."""
    gate, up = F.linear(x, gate_up.flatten(0, 1)).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def route(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, config: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts: (choice [T, k] int64, weight [T, k] in the wide dtype).

    DeepSeek-V2 (arXiv 2405.04434, section 2.1.2) and V3 (arXiv 2412.19437, section 2.1.2): the bias and the groups
    decide only who is chosen; weights come from the scores themselves.
    """
    logits = F.linear(wide(x), wide(router))
    scores = logits.sigmoid() if config.scoring is Scoring.SIGMOID else logits.softmax(dim=-1)
    ranking = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = ranking.unflatten(-1, (config.num_groups, -1))
        if config.group_score is GroupScore.TOP2_SUM:
            group = grouped.topk(2, dim=-1).values.sum(dim=-1)
        else:
            group = grouped.amax(dim=-1)
        kept = torch.zeros_like(group, dtype=torch.bool)
        kept.scatter_(1, group.topk(config.top_groups, dim=-1).indices, True)
        ranking = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    choice = ranking.topk(config.top_k, dim=-1).indices
    weight = scores.gather(1, choice)
    if config.normalize:
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
    return choice, weight * config.scale


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Mixes int64 numbers: a bijection in which every output bit depends on every input bit."""
    return mix64(x * GAMMA)


def uniform_choice(num_layers: int, token: torch.Tensor, position: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Random experts in place of a router's: [num_layers, T, k] int64, k different ones each, all sets equally likely.

    The choice depends only on token and position [T] (id and position of each token) and on the layer's number, so it
    is the same on every rank, in every layout and on every device. All layers are computed at once, to make few calls.
    Floyd's sampling (Bentley, Programming Pearls, CACM 30(9), 1987): a number that was drawn before is replaced by the
    largest one that this draw could have given.
    """
    device, k = token.device, experts.top_k
    layer = torch.arange(num_layers, device=device)[:, None]
    key = _mixed(_mixed(_mixed(layer) ^ position.to(torch.int64)) ^ token.to(torch.int64))
    last = torch.arange(experts.num_experts - k, experts.num_experts, device=device)
    draw = _mixed(key[..., None] ^ torch.arange(1, k + 1, device=device))
    # 63 bits are so many that the modulo's bias cannot be noticed.
    choice = (draw & ((1 << 63) - 1)) % (last + 1)
    for i in range(1, k):
        before = (choice[..., :i] == choice[..., i : i + 1]).any(dim=-1)
        choice[..., i] = torch.where(before, last[i], choice[..., i])
    return choice
