"""What each plugin layer computes, in plain torch, to evaluate networks that contain such layers.

A function takes the layer's inputs in order and its attributes by name, and returns the outputs. An output that aliases
an input is that input, modified. Undefined numbers are NaN. DOP's exchange needs peers and is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from splash_plugins.cache_append import reference as append
from splash_plugins.lse_merge import reference as merge
from splash_plugins.mla_attention.decode_reference import decode
from splash_plugins.mla_attention.prefill_reference import prefill
from splash_plugins.page_transfer import reference as transfer

Tensors = tuple[torch.Tensor, ...]


def lse_merge(outs: torch.Tensor, lses: torch.Tensor) -> Tensors:
    return merge.lse_merge(outs, lses)


def cache_append(
    pool: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, *, layer: int
) -> Tensors:
    append.append_rows(pool[:, layer], rows, page, offset)
    return (pool,)


def page_transfer(source: torch.Tensor, taken: torch.Tensor, placed: torch.Tensor, pool: torch.Tensor) -> Tensors:
    transfer.page_transfer(source, taken, pool, placed)
    return (pool,)


def mla_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    *,
    layer: int,
    stride: int,
    latent: int,
    scale: float,
) -> Tensors:
    out = q.new_empty((*q.shape[:2], latent))
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    decode(q, pool[:, layer], tables, slot, first, length, None, stride, latent, scale, out, lse)
    return out, lse


def mla_prefill(
    q: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    tiles: torch.Tensor,
    *,
    scale: float,
) -> Tensors:
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)
    prefill(q, position, rows, k_nope, v, segments, tiles, scale, out, lse, False)
    return out, lse


def grouped_experts_up(
    x: torch.Tensor, choice: torch.Tensor, gate_up: torch.Tensor, *, first_expert: int, max_tokens: int
) -> Tensors:
    hidden = x.new_full((choice.numel(), gate_up.shape[1] // 2), torch.nan)
    for pair, expert in enumerate(choice.flatten().tolist()):
        if 0 <= expert - first_expert < len(gate_up):
            both = F.linear(x[pair // choice.shape[1]].float(), gate_up[expert - first_expert].float())
            gate, up = both.chunk(2)
            hidden[pair] = (F.silu(gate) * up).to(x.dtype)
    return (hidden,)


def grouped_experts_down(
    hidden: torch.Tensor,
    down: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    *,
    first_expert: int,
    max_tokens: int,
) -> Tensors:
    out = torch.zeros((len(choice), down.shape[1]), dtype=torch.float32, device=down.device)
    for pair, expert in enumerate(choice.flatten().tolist()):
        if 0 <= expert - first_expert < len(down):
            y = F.linear(hidden[pair], down[expert - first_expert]).float()
            out[pair // choice.shape[1]] += y * weight.flatten()[pair]
    return (out.to(hidden.dtype),)


REFERENCES: Mapping[str, Callable[..., Tensors]] = {
    f"splash::{function.__name__}": function
    for function in (
        lse_merge,
        cache_append,
        page_transfer,
        mla_attention,
        mla_prefill,
        grouped_experts_up,
        grouped_experts_down,
    )
}
