"""Computes values from attention's latent outputs, in plain torch.

A queries, H heads, L KV latent, v a head's values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splash_plugins.mla_attention.cut import Parts
from splash_plugins.mla_attention.decode_reference import decode


def value_up(latents: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor) -> None:
    """latents [A, H, L] times w_uv [H, v, L], head by head, into out [A, H, v]."""
    torch.bmm(latents.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))


def decode_values(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    parts: Parts | None,
    stride: int,
    latent: int,
    scale: float,
    w_uv: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """decode of decode_reference.py, rounded to q's dtype, then value_up with each tensor of w_uv, for consecutive
    blocks of heads, into out [A, H, v]."""
    latents = q.new_empty((*q.shape[:2], latent))
    decode(q, pages, tables, slot, first, length, parts, stride, latent, scale, latents, None)
    begin = 0
    for w in w_uv:
        heads = slice(begin, begin + len(w))
        value_up(latents[:, heads], w, out[:, heads])
        begin += len(w)
