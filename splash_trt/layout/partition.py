"""Which rank computes which of a step's tokens. Pure numpy: rank 0 counts tokens with it, every rank indexes with it.

R rows (one request's tokens in the step), T tokens, N ranks.
"""

from __future__ import annotations

import numpy as np

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Tokens


def token_ranks(
    layout: Layout,
    home: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    absorbed: np.ndarray,
    *,
    num_ranks: int,
    page_tokens: int,
) -> np.ndarray | None:
    """[T] int32: the rank that computes each token; None where all ranks compute all (TP, DOP).

    home, start, count [R] int32 and absorbed [R] bool are those of a plan. In CP, an expanded row's token is computed
    on the rank that will hold its cache row, (home + position // page_tokens) mod N. So the cache row is already where
    it belongs, and since pages go to ranks in turn, every rank gets an equal share of the causal triangle's work. A
    token of an absorbed row is computed on the request's home.
    """
    spec = SPECS[layout]
    if spec.tokens is Tokens.EVERYWHERE:
        return None
    owner = np.repeat(home, count)
    if spec.placement is PlacementKind.OWNED:
        return owner
    first = np.cumsum(count) - count
    position = np.arange(len(owner), dtype=np.int32) + np.repeat(start - first, count)
    stripe = (owner + position // page_tokens) % num_ranks
    return np.where(np.repeat(absorbed, count), owner, stripe).astype(np.int32)


def rank_counts(ranks: np.ndarray | None, num_tokens: int, num_ranks: int) -> np.ndarray:
    """[N] int32: tokens whose hidden state each rank holds in the step."""
    if ranks is None:
        return np.full(num_ranks, num_tokens, np.int32)
    return np.bincount(ranks, minlength=num_ranks).astype(np.int32)
