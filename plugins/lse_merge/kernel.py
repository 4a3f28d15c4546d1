"""Triton: merges attention over parts of a context into attention over all of it, one program a row of [n, H].

K parts, n queries, H heads, d numbers a head. Reads K n H (d + 1) numbers and writes n H (d + 1).
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def lse_merge_kernel(outs, lses, num_rows, out, lse, PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """outs [K, num_rows, SIZE], lses [K, num_rows], all float32 and contiguous, to out and lse."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    top = tl.load(lses + row)
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(lses + part * num_rows.to(tl.int64) + row))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    merged = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = part * num_rows.to(tl.int64) + row
        weight = tl.exp(tl.load(lses + at) - shift)
        # The output of a part that saw no row may hold anything.
        taken = tl.where(weight > 0, SIZE, 0)
        merged += weight * tl.load(outs + at * SIZE + column, mask=column < taken, other=0.0)
        total += weight
    tl.store(out + row * SIZE + column, merged / tl.where(total > 0, total, 1.0), mask=inside)
    tl.store(lse + row, tl.log(total) + shift)


def lse_merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As plugins/lse_merge/reference.py, for contiguous float32 tensors. Allocates its results (torch.empty)."""
    parts, queries, heads, size = outs.shape
    assert outs.is_contiguous() and lses.is_contiguous() and outs.dtype == lses.dtype == torch.float32
    out = outs.new_empty((queries, heads, size))
    lse = lses.new_empty((queries, heads))
    rows = queries * heads
    if rows:
        block = triton.next_power_of_2(size)
        lse_merge_kernel[(rows,)](outs, lses, rows, out, lse, PARTS=parts, SIZE=size, BLOCK=block, num_warps=4)
    return out, lse
