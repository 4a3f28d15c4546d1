"""What decode_kernel.decode computes, in plain torch.

A queries, H heads on this rank, L latent, R rope part, W = L + R; P pages of S rows.
"""

from __future__ import annotations

import torch

from splash_plugins.mla_attention.cut import Parts
from splash_plugins.mla_attention.reference import mla_decode


def decode(
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
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention of absorbed queries to those rows of their contexts that this rank holds.

    q [A, H, W]; pages [P, S, W] of one layer; tables [slots, C] int32; slot, first, length [A] int32: row j < length[a]
    of query a's context lies in page tables[slot[a], first[a] + stride * (j // S)] at offset j % S. Writes out
    [A, H, L] and lse [A, H] (natural logarithm, float32); 0 and -inf where length is 0.
    parts: how GPU kernels cut contexts of these lengths (cut.py). There only rounding depends on it; here it is unused.
    """
    if q.shape[0] == 0:
        return
    page_tokens = pages.shape[1]
    page = torch.arange(-(-int(length.max()) // page_tokens), device=q.device, dtype=torch.int32)
    seen = page * page_tokens < length[:, None]  # table entries past the context may be anything
    column = torch.where(seen, first[:, None] + stride * page, 0)
    taken = torch.where(seen, tables[slot.clamp(min=0)[:, None], column], 0)
    result, sums = mla_decode(q, pages, taken, length, latent=latent, scale=scale)
    out.copy_(result)
    if lse is not None:
        lse.copy_(sums)
