"""Merges attention over parts of a context into attention over all of it, by log-sum-exp, in plain torch."""

from __future__ import annotations

import torch


def lse_merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [K, n, H, d] and lses [K, n, H] are the results for K disjoint parts; one with lse -inf has weight 0.

    Returns out [n, H, d] and lse [n, H]; 0 and -inf where all parts have -inf.
    """
    top = lses.amax(dim=0)
    shift = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    weight = torch.exp(lses - shift)  # [K, n, H]
    total = weight.sum(dim=0)
    out = (outs * weight[..., None]).sum(dim=0) / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
    return out, torch.log(total) + shift
