"""Triton: copies whole cache pages, a few at a time inside a step; large moves are left to the copy engines.

A program copies one block of one page. The source may be another rank's pool that is mapped into this rank.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def transfer_kernel(source, taken, placed, pool, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """source [P', SIZE] and pool [P, SIZE], contiguous. Grid: (pages, blocks of a page)."""
    index = tl.program_id(0)
    to = tl.load(placed + index).to(tl.int64)
    if to >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(taken + index).to(tl.int64)
        x = tl.load(source + at * SIZE + column, mask=column < SIZE)
        tl.store(pool + to * SIZE + column, x, mask=column < SIZE)


def page_transfer(source: torch.Tensor, taken: torch.Tensor, pool: torch.Tensor, placed: torch.Tensor) -> None:
    """As plugins/page_transfer/reference.py, for contiguous pools."""
    count, size = len(placed), pool.shape[1]
    assert source.is_contiguous() and pool.is_contiguous() and source.shape[1] == size
    if count:
        transfer_kernel[(count, triton.cdiv(size, BLOCK))](
            source, taken, placed, pool, SIZE=size, BLOCK=BLOCK, num_warps=8
        )
