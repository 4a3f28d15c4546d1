"""Decode attention under each layout: absorbed queries meet latent rows where those lie.

A_r absorbed tokens on this rank, H heads resident, W = L + R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from splash_plugins.cache_append.reference import cache_append
from splash_plugins.dop_exchange.reference import to_heads, to_owners
from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.reference import mla_decode
from splash_trt.config import Layout
from splash_trt.dist.collectives import Collectives
from splash_trt.runtime.inputs import Absorbed


@dataclass(frozen=True, kw_only=True)
class AbsorbedAttention:
    """What the three ways share. heads: attention heads of each rank under SHARD."""

    collectives: Collectives
    heads: Sequence[int]
    latent: int
    scale: float

    def read(self, q: torch.Tensor, pages: torch.Tensor, step: Absorbed) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n, H, W] of step.context against this rank's pages: outputs [n, H, L], log-sum-exp [n, H]."""
        context = step.context
        return mla_decode(q, pages, context.tables, context.length, latent=self.latent, scale=self.scale)


def local(
    a: AbsorbedAttention, q: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, step: Absorbed
) -> torch.Tensor:
    """TP and DP: the whole context is in this rank's pages. q [A_r, H, W], rows [A_r, W] -> [A_r, H, L]."""
    return a.read(q, pages, step)[0]


def at_owner(
    a: AbsorbedAttention, q: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, step: Absorbed
) -> torch.Tensor:
    """DOP: every rank has all tokens but only its heads; owners have the rows and attend with all heads."""
    if a.collectives.size == 1:
        return local(a, q, rows, pages, step)
    all_heads = to_owners(q, step.readers, a.heads, a.collectives)
    out, _ = a.read(all_heads, pages, step)
    return to_heads(out.to(q.dtype), step.readers, a.heads, a.collectives)


def by_stripes(
    a: AbsorbedAttention, q: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, step: Absorbed
) -> torch.Tensor:
    """CP: each rank attends to its stripe of the context; the home rank merges.

    A token's new cache row travels with its queries as one more head, and is stored before its stripe is read.
    """
    n, heads, width = q.shape
    packed = torch.cat([q, rows[:, None]], dim=1)
    got = a.collectives.all_to_all([packed[i] for i in step.readers], [(m, heads + 1, width) for m in step.num_from])
    received = torch.cat(got)
    append = step.append
    cache_append(pages, received[append.source, heads], append.page, append.offset)
    out, lse = a.read(received[:, :heads], pages, step)
    partial = torch.cat([out, lse[..., None]], dim=-1)
    back = a.collectives.all_to_all(
        list(partial.split(list(step.num_from))), [(len(i), heads, a.latent + 1) for i in step.readers]
    )
    parts = partial.new_zeros((len(back), n, heads, a.latent + 1))
    parts[..., -1] = -torch.inf
    for part, index, values in zip(parts, step.readers, back, strict=True):
        part[index] = values
    return lse_merge(parts[..., :-1], parts[..., -1])[0]


ABSORBED: dict[Layout, Callable[..., torch.Tensor]] = {
    Layout.TP: local,
    Layout.DP: local,
    Layout.CP: by_stripes,
    Layout.DOP: at_owner,
}
