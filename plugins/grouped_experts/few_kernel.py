"""Triton: the gated experts for few tokens, where the time is that of reading the weights of each chosen expert once.

Names as in product_kernel.py, except that row p of `hidden` is pair p's too. Pairs are not sorted: each program finds
its expert's pairs among the few that there are, while others stream weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.grouped_experts.product_kernel import down_tile, gate_up_tile, store_rows
from splash_plugins.overlap_kernel import wait_for_inputs

# These arguments' values do not specialise a kernel (Triton would do so for 1 and multiples of 16).
VARYING = ["num_pairs", "first_expert", "num_experts"]


@triton.jit
def _find(choice, num_pairs, candidate, first_expert, num_experts, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr):
    """(expert as int64, counted from this rank's first; its number of pairs; ordinal [PAIRS]: which of them a pair is,
    -1 for pairs of others).

    candidate: an expert of this rank; with BY_PAIR a pair, which stands for its expert if that is this rank's and no
    earlier pair has chosen it (else the number is 0).
    """
    pair = tl.arange(0, PAIRS)
    local = tl.load(choice + pair, mask=pair < num_pairs, other=-1) - first_expert
    if BY_PAIR:
        expert = tl.load(choice + candidate) - first_expert
    else:
        expert = candidate
    hit = (local == expert) & (pair < num_pairs)
    count = tl.sum(hit.to(tl.int32), 0)
    if BY_PAIR:
        earlier = tl.sum((hit & (pair < candidate)).to(tl.int32), 0)
        count = tl.where((earlier == 0) & (expert >= 0) & (expert < num_experts), count, 0)
    ordinal = tl.where(hit, tl.cumsum(hit.to(tl.int32), 0) - 1, -1)
    return expert.to(tl.int64), count, ordinal


@triton.jit
def _pairs_at(ordinal, row, PAIRS: tl.constexpr):
    """The pairs whose ordinals are `row`."""
    found = ordinal[None, :] == row[:, None]
    return tl.sum(tl.where(found, tl.arange(0, PAIRS)[None, :], 0), 1)


@triton.jit(do_not_specialize=VARYING)
def few_gate_up_kernel(
    x, x_stride, gate_up, hidden, choice, num_pairs, first_expert, num_experts,
    DEPTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """hidden [P, I] = silu(x gate) * (x up) from x [T, D]. Grid: (tiles of columns, candidates)."""
    wait_for_inputs(OVERLAP)
    expert, count, ordinal = _find(choice, num_pairs, tl.program_id(1), first_expert, num_experts, PAIRS, BY_PAIR)
    n = tl.program_id(0)
    first = 0
    while first < count:
        row = first + tl.arange(0, BLOCK_M)
        pair = _pairs_at(ordinal, row, PAIRS)
        keep = row < count
        token = (pair // TOP_K).to(tl.int64)
        value = gate_up_tile(
            x, token, x_stride, keep, gate_up, expert, n, DEPTH, INNER, BLOCK_N, BLOCK_K, TMA, PRECISION
        )
        store_rows(hidden, pair.to(tl.int64), keep, n, value, INNER, BLOCK_N)
        first += BLOCK_M


@triton.jit(do_not_specialize=VARYING)
def few_down_kernel(
    hidden, down, out, choice, num_pairs, first_expert, num_experts,
    INNER: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [P, D] from hidden [P, I]. Grid: (tiles of columns, candidates)."""
    wait_for_inputs(OVERLAP)
    expert, count, ordinal = _find(choice, num_pairs, tl.program_id(1), first_expert, num_experts, PAIRS, BY_PAIR)
    n = tl.program_id(0)
    first = 0
    while first < count:
        row = first + tl.arange(0, BLOCK_M)
        pair = _pairs_at(ordinal, row, PAIRS).to(tl.int64)
        keep = row < count
        value = down_tile(hidden, pair, keep, down, expert, n, INNER, WIDTH, BLOCK_N, BLOCK_K, TMA, PRECISION)
        store_rows(out, pair, keep, n, value, WIDTH, BLOCK_N)
        first += BLOCK_M
