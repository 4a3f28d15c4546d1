"""Triton: sorts (token, choice) pairs by this rank's experts, and lists the blocks of rows that the products compute.

P = T * k pairs, E_r experts on this rank. A counting sort: one launch counts the pairs of each expert in each chunk of
pairs, a second one places each chunk's pairs. If there are few pairs, each program counts all of them itself, which
saves the first launch. An expert's pairs stay in their order, so the same choices always give the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs

ONE_HOT = 8192  # (pair, expert) cells that a program compares at once
MAX_CHUNK = 256  # most pairs of one program
FEW_HOT = 32768  # up to so many cells in all, each program compares all of them
FEW_CHUNK = 64  # most pairs of one program then
BLOCK_FIELDS = 4  # expert, first row, end row, unused
# These arguments' values do not specialise a kernel (Triton would do so for 1 and multiples of 16).
VARYING = ["num_pairs", "first_expert", "num_experts", "num_chunks"]


class SortedPairs(NamedTuple):
    pairs: torch.Tensor
    """[P] int32: pair ids, expert by expert; undefined past ends[-1]."""
    ends: torch.Tensor
    """[E_r] int32: where each expert's pairs end in `pairs`."""
    blocks: torch.Tensor
    """[max_blocks, 4] int32: (expert, counted from this rank's first; first row; end row; unused) of each block of at
    most block_m rows of one expert. Rows are places in `pairs`."""
    num_blocks: torch.Tensor
    """[1] int32: how many entries of `blocks` are used."""


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks of block_m rows that num_pairs pairs of num_experts experts can make."""
    return min(num_pairs, num_experts + num_pairs // block_m)


@triton.jit
def _hits(choice, pair, num_pairs, first_expert, num_experts, EXPERTS: tl.constexpr):
    """[pairs, EXPERTS] int32: 1 where the pair has chosen this expert."""
    expert = tl.arange(0, EXPERTS)
    local = tl.load(choice + pair, mask=pair < num_pairs, other=-1) - first_expert
    # Padding (-1) matches no expert, since first_expert is 0 or more.
    return ((local[:, None] == expert[None, :]) & (expert < num_experts)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=VARYING)
def count_kernel(
    choice, counts, num_pairs, first_expert, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """counts [chunks, EXPERTS]: the number of each expert's pairs in each chunk."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    hits = _hits(choice, pair, num_pairs, first_expert, num_experts, EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.sum(hits, 0))


@triton.jit
def _write_blocks(start, total, blocks, num_blocks, first, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):  # fmt: skip # noqa: E501
    """Writes entries first … first + BLOCKS - 1 of `blocks`. start, total [EXPERTS]: each expert's first row and number
    of rows."""
    expert = tl.arange(0, EXPERTS)
    size = (total + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(size, 0)
    count = tl.sum(size, 0)
    block = first + tl.arange(0, BLOCKS)
    owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)
    owned = owner[:, None] == expert[None, :]
    row = block * BLOCK_M + tl.sum(tl.where(owned, (start - (end - size) * BLOCK_M)[None, :], 0), 1)
    stop = tl.sum(tl.where(owned, (start + total)[None, :], 0), 1)
    entry = blocks + block * 4
    valid = block < count
    tl.store(entry, owner, mask=valid)
    tl.store(entry + 1, row, mask=valid)
    tl.store(entry + 2, tl.minimum(row + BLOCK_M, stop), mask=valid)
    tl.store(num_blocks, count, mask=first == 0)


@triton.jit(do_not_specialize=VARYING)
def place_kernel(
    choice, counts, pairs, ends, blocks, num_blocks, num_pairs, first_expert, num_experts, num_chunks,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Writes this chunk's pairs to their places, and its share of the table of blocks.

    ROWS: rows of `counts` to read at a time. If counts is None, all pairs are counted here, and ROWS is their number,
    padded.
    """
    wait_for_inputs(OVERLAP)
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    hits = _hits(choice, pair, num_pairs, first_expert, num_experts, EXPERTS)
    if counts is None:
        every = tl.arange(0, ROWS)
        found = _hits(choice, every, num_pairs, first_expert, num_experts, EXPERTS)
        total = tl.sum(found, 0)
        before = tl.sum(tl.where((every < chunk * CHUNK)[:, None], found, 0), 0)
    else:
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        first = 0
        while first < num_chunks:
            row = first + tl.arange(0, ROWS)
            cell = counts + row[:, None] * EXPERTS + expert[None, :]
            count = tl.load(cell, mask=(row < num_chunks)[:, None], other=0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where((row < chunk)[:, None], count, 0), 0)
            first += ROWS
    start = tl.cumsum(total, 0) - total
    place = tl.sum(hits * (tl.cumsum(hits, 0) - 1 + (start + before)[None, :]), 1)
    tl.store(pairs + place, pair, mask=tl.sum(hits, 1) > 0)
    tl.store(ends + expert, start + total, mask=(expert < num_experts) & (chunk == 0))
    _write_blocks(start, total, blocks, num_blocks, chunk * BLOCKS, BLOCKS, BLOCK_M, EXPERTS)


def sort_pairs(
    choice: torch.Tensor, num_experts: int, first_expert: int, block_m: int, *, after_join: bool = False
) -> SortedPairs:
    """choice [T, k] int32, contiguous, with at least one pair. One launch up to FEW_HOT pairs times experts, else two.

    after_join: see overlap_kernel.overlap.
    """
    num_pairs = choice.numel()
    experts = triton.next_power_of_2(num_experts)
    padded = triton.next_power_of_2(num_pairs)
    few = padded * experts <= FEW_HOT
    chunk = min(FEW_CHUNK if few else MAX_CHUNK, max(16, ONE_HOT // experts))
    chunks = triton.cdiv(num_pairs, chunk)
    most = max_blocks(num_pairs, num_experts, block_m)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=choice.device)

    out = SortedPairs(ints(num_pairs), ints(num_experts), ints(most, BLOCK_FIELDS), ints(1))
    # A chunk's share of the most blocks that all chunks can make. It is largest for few chunks, so more than two take
    # the share of two.
    some = min(chunks, 2)
    share = triton.cdiv(num_experts + triton.cdiv(some * chunk, block_m), some)
    counts = None if few else ints(chunks, experts)
    warps = 8 if max(chunk, padded if few else 0) * experts >= ONE_HOT else 4
    overlapped = overlap(choice, after_join=after_join)
    if counts is not None:
        count_kernel[(chunks,)](
            choice, counts, num_pairs, first_expert, num_experts, EXPERTS=experts, CHUNK=chunk, num_warps=warps,
            **overlapped,
        )  # fmt: skip
        overlapped = overlap(choice)
    place_kernel[(chunks,)](
        choice, counts, *out, num_pairs, first_expert, num_experts, chunks,
        EXPERTS=experts, CHUNK=chunk, BLOCKS=triton.next_power_of_2(share), BLOCK_M=block_m,
        ROWS=padded if few else max(1, 4096 // experts), num_warps=warps, **overlapped,
    )  # fmt: skip
    return out
