"""Triton: gathers context rows from this rank's pages. P pages of S rows, W = latent + rope, C rows wanted."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    pages, page, offset, out, num_rows, page_stride, row_stride, out_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    wanted = row < num_rows
    source = tl.load(page + row, wanted, other=-1)
    place = tl.load(offset + row, wanted, other=0)
    begin = source.to(tl.int64) * page_stride + place.to(tl.int64) * row_stride
    inside = (column < WIDTH)[None, :]
    values = tl.load(pages + begin[:, None] + column[None, :], (source >= 0)[:, None] & inside, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + column[None, :], values, wanted[:, None] & inside)


def gather_rows(pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = pages[page[i], offset[i]]; zeros where page[i] is -1.

    pages [P, S, W], one layer's strided view, dense in its last dim; page, offset [C] int32; out [C, W].
    """
    num_rows, width = out.shape
    assert pages.stride(2) == 1 and out.stride(1) == 1 and pages.shape[2] == width
    if num_rows == 0:
        return
    _gather_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
        pages, page, offset, out, num_rows, pages.stride(0), pages.stride(1), out.stride(0),
        WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=BLOCK_ROWS, num_warps=8,
    )  # fmt: skip
