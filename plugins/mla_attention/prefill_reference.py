"""What prefill_kernel.prefill computes, in plain torch, with the same signature."""

from __future__ import annotations

import torch

from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.reference import mla_prefill


def prefill(
    q: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    merge: bool,
) -> None:
    """Shapes and meaning as in prefill_kernel.prefill. Of the tiles, only the segments that they name matter: those are
    computed whole."""
    nope = k_nope.shape[2]
    rope = q.shape[2] - nope
    named = set(tiles[:, 0].tolist())
    for index, (begin, end, key_begin, key_end, first_key) in enumerate(segments.tolist()):
        if index not in named or begin == end:
            continue
        queries, keys = slice(begin, end), slice(key_begin, key_end)
        new, new_lse = mla_prefill(
            q[queries, :, :nope],
            q[queries, :, nope:],
            position[queries],
            k_nope[keys],
            rows[keys, rows.shape[1] - rope :],
            v[keys],
            first_key,
            scale=scale,
        )
        if merge:
            assert lse is not None
            outs = torch.stack([out[queries].to(new.dtype), new])
            new, new_lse = lse_merge(outs, torch.stack([lse[queries].to(new_lse.dtype), new_lse]))
        out[queries] = new.to(out.dtype)
        if lse is not None:
            lse[queries] = new_lse.to(lse.dtype)
