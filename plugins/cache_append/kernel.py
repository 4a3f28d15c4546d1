"""Triton: writes new cache rows into their pages, one program a row. T rows of W numbers, P pages of S rows.

The kernel that makes rows on GPUs (plugins/latent_rows) writes them into pages itself; this one is for rows that exist
already.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def append_kernel(
    rows, rows_stride, page, offset, pages, page_stride, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.load(page + row).to(tl.int64)
    if at >= 0:
        x = tl.load(rows + row.to(tl.int64) * rows_stride + column, mask=inside)
        to = pages + at * page_stride + tl.load(offset + row).to(tl.int64) * row_stride
        tl.store(to + column, x, mask=inside)


def append_rows(pages: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """As plugins/cache_append/reference.py's append_rows; last axes are contiguous, page and offset int32."""
    count, width = rows.shape
    if count:
        append_kernel[(count,)](
            rows, rows.stride(0), page, offset, pages, pages.stride(0), pages.stride(1),
            WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
