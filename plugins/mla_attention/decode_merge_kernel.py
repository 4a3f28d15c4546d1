"""Triton: merges decode attention's results for the parts of a context, weighted by their log-sum-exps.

A queries, H heads, L latent; n parts, those of a query one after another (cut.py).
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.mla_attention.cut import Parts
from splash_plugins.overlap_kernel import overlap, wait_for_inputs

# A program reads at most this many parts of a context at a time, and at most this many numbers of them together.
MERGE_BLOCK = 8
MERGE_NUMBERS = 4096
# About so many programs fill an H200. More would cost: programs that find nothing to merge take time too.
PROGRAMS = 640


@triton.jit
def _merge_one(
    partial, partial_lse, begin, count, head, column, HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Merges columns `column` of one head over parts begin to begin + count - 1: (result, log-sum-exp)."""
    top = -float("inf")
    total = 0.0
    sums = tl.zeros([column.shape[0]], tl.float32)
    for done in range(0, count, BLOCK_S):
        part = done + tl.arange(0, BLOCK_S)
        live = part < count
        row = (begin + part).to(tl.int64) * HEADS + head
        part_lse = tl.load(partial_lse + row, mask=live, other=-float("inf"))
        inside = live[:, None] & (column[None, :] < LATENT)
        values = tl.load(partial + row[:, None] * LATENT + column[None, :], mask=inside, other=0)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        weight = tl.exp(part_lse - new_top)
        fade = tl.exp(top - new_top)
        total = total * fade + tl.sum(weight, 0)
        sums = sums * fade + tl.sum(values * weight[:, None], 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1)
    return sums / divisor, top + tl.log(divisor)


@triton.jit
def _parts_at(merged, read_part, place, most):
    """Entry `place` of `merged` [most]: (query, its first part, number of its parts); query -1 if there is none."""
    query = tl.load(merged + place, mask=place < most, other=-1).to(tl.int64)
    begin = tl.load(read_part + 2 * query, mask=query >= 0, other=0)
    count = tl.load(read_part + 2 * query + 1, mask=query >= 0, other=0)
    return query, begin, count


@triton.jit(do_not_specialize=["most", "lse_stride"])
def merge_kernel(
    partial, partial_lse, merged, read_part, most,
    out, out_stride, out_head_stride,
    lse, lse_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merges partial [n, H, L] and partial_lse [n, H], as decode_kernel wrote them, into out and lse for the queries
    `merged` [most]; read_part [A, 2] says which parts are a query's."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    query, begin, count = _parts_at(merged, read_part, place, most)
    wait_for_inputs(OVERLAP)
    while query >= 0:
        # The next query's parts are looked up while this one's are merged: two dependent loads.
        place += tl.num_programs(0)
        next_query, next_begin, next_count = _parts_at(merged, read_part, place, most)
        result, sum_lse = _merge_one(partial, partial_lse, begin, count, head, column, HEADS, LATENT, BLOCK_S)
        to = out + query * out_stride + head * out_head_stride + column
        tl.store(to, result.to(out.dtype.element_ty), mask=column < LATENT)
        if lse is not None:
            if tl.program_id(2) == 0:
                tl.store(lse + query * lse_stride + head, sum_lse)
        query, begin, count = next_query, next_begin, next_count


def merge(
    partial: torch.Tensor, partial_lse: torch.Tensor, parts: Parts, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Merges the contexts that have several parts into out [A, H, L] and lse [A, H]."""
    heads, latent = partial.shape[1:]
    block = min(MERGE_NUMBERS // MERGE_BLOCK, triton.next_power_of_2(latent))
    blocks = triton.cdiv(latent, block)
    most = len(parts.merged)
    merge_kernel[(min(most, max(1, PROGRAMS // (heads * blocks))), heads, blocks)](
        partial, partial_lse, parts.merged, parts.read_part, most,
        out, out.stride(0), out.stride(1),
        lse, lse.stride(0) if lse is not None else 0,
        HEADS=heads, LATENT=latent, BLOCK_S=MERGE_BLOCK, BLOCK_L=block,
        num_warps=8, **overlap(out),
    )  # fmt: skip
