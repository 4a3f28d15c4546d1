"""Makes normed query latents and cache rows of the down projections, in plain torch.

T tokens, Q query latent, L KV latent, R rope part, W = L + R; P pages of S rows.
"""

from __future__ import annotations

import torch

from splash_engines import ops
from splash_plugins.cache_append.reference import append_rows


def latent_rows(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latent: torch.Tensor | None,
    rows: torch.Tensor,
    pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    target_page: torch.Tensor | None,
    target_offset: torch.Tensor | None,
) -> None:
    """Fills latent [T, Q] and rows [T, W] from qkv [T, Q + W], and writes the rows into pages [P, S, W] of one layer.

    q_norm [Q] and latent are None where Q is 0; kv_norm [L]; cos, sin [T, R / 2] float32 or wider. Row t also goes to
    pages[page[t], offset[t]], unless page[t] is negative; page, offset [T] int32. target_page and target_offset name a
    second place in the same way (a switch's target), or are None.
    """
    num_latent = kv_norm.shape[0]
    q, kv, k_rope = qkv.split([qkv.shape[1] - rows.shape[1], num_latent, rows.shape[1] - num_latent], dim=-1)
    if latent is not None:
        assert q_norm is not None
        latent.copy_(ops.rms_norm(q, q_norm, eps))
    rows[:, :num_latent] = ops.rms_norm(kv, kv_norm, eps)
    rows[:, num_latent:] = ops.apply_rope(k_rope, cos, sin, interleaved)
    for to_page, to_offset in ((page, offset), (target_page, target_offset)):
        if to_page is not None and to_offset is not None:
            append_rows(pages, rows, to_page, to_offset)
