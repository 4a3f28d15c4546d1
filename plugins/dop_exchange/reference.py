"""DOP's exchange: each head shard's absorbed queries go to the owners of their requests, latent outputs come back.

N ranks, A tokens in plan order (the same on every rank), H_r heads of rank r, H all heads, W = L + R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splash_trt.dist.collectives import Collectives


def to_owners(
    q: torch.Tensor, tokens_of: Sequence[torch.Tensor], heads: Sequence[int], collectives: Collectives
) -> torch.Tensor:
    """q [A, H_me, W] of this rank's heads; tokens_of[r]: indices below A of the tokens that rank r owns; heads[r]: H_r.

    Returns [A_me, H, W]: all heads, in rank order, of the tokens this rank owns.
    """
    mine, width = len(tokens_of[collectives.rank]), q.shape[2]
    got = collectives.all_to_all([q[index] for index in tokens_of], [(mine, h, width) for h in heads])
    return torch.cat(got, dim=1)


def to_heads(
    out: torch.Tensor, tokens_of: Sequence[torch.Tensor], heads: Sequence[int], collectives: Collectives
) -> torch.Tensor:
    """out [A_me, H, L] of the tokens this rank owns; returns [A, H_me, L]: this rank's heads of all tokens."""
    send = [part.contiguous() for part in out.split(list(heads), dim=1)]
    mine, latent = heads[collectives.rank], out.shape[2]
    got = collectives.all_to_all(send, [(len(index), mine, latent) for index in tokens_of])
    back = out.new_empty((sum(len(index) for index in tokens_of), mine, latent))
    for index, part in zip(tokens_of, got, strict=True):
        back[index] = part
    return back
