"""Triton: copies tokens' rows into the sorted order of pairs, for products that need them so (torch_kernel.py).

T tokens, D hidden, P pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs

BLOCK = 1024


@triton.jit
def gather_kernel(
    x, x_stride, pairs, num_rows, rows, place, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_rows):
        return
    pair = tl.load(pairs + row)
    if tl.program_id(1) == 0:
        tl.store(place + pair, row.to(tl.int32))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = x + (pair // TOP_K).to(tl.int64) * x_stride
    tl.store(rows + row * width + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)


def gather_rows(
    x: torch.Tensor, pairs: torch.Tensor, num_rows: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows [P, D], the tokens' rows of the first num_rows [1] of pairs [P]; and place [P] int32, the row that
    each pair has there. Rows past num_rows, and places of other pairs, stay undefined.
    """
    width = x.shape[1]
    rows = x.new_empty((len(pairs), width))
    place = torch.empty_like(pairs)
    block = min(BLOCK, triton.next_power_of_2(width))
    gather_kernel[(len(pairs), triton.cdiv(width, block))](
        x, x.stride(0), pairs, num_rows, rows, place, width,
        TOP_K=top_k, BLOCK=block, num_warps=max(1, block // 256), **overlap(x),
    )  # fmt: skip
    return rows, place
