"""Triton: products of few rows with weights w [N, K] that have stride 1 along N. The result is left in parts, one for
each part of the depth (split-K), to be added up by whoever reads it.

T rows, K numbers each, N columns. To read whole cache lines of such weights, a program needs many columns; but then
there are too few programs to have all weights in flight. So the depth is cut too, and the kernel that reads the result
(plugins/peer_rows) adds up the parts, in their order, so that no launch is needed for it.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.overlap_kernel import overlap, wait_for_inputs

MOST_ROWS = 16
"""With more rows it is not faster than torch's product, in whole steps on an H200."""
PART = 256
"""Depth of a part."""
MOST_PARTS = 16
"""One program adds up all parts of a row and reads 4 bytes a column for each. Measured with 10 parts (GLM-4.7-Flash),
not with more."""
CHUNK = 128
COLUMNS = 128


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def parts_kernel(
    x, x_stride, num_rows, w, depth_stride, num_parts, out,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [T, parts, N]. Grid: (tiles of columns, parts). A program loads all its weights before the rows are there."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * PART
    chunks = ()
    for c in tl.static_range(PART // CHUNK):
        k = begin + c * CHUNK + tl.arange(0, CHUNK)
        at = w + k.to(tl.int64)[:, None] * depth_stride + column[None, :]
        chunk = tl.load(at, mask=(k < DEPTH)[:, None] & (column < WIDTH)[None, :], other=0)
        chunks = chunks + (chunk,)  # type: ignore[assignment]
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, BLOCK_T)
    sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for c in tl.static_range(PART // CHUNK):
        k = begin + c * CHUNK + tl.arange(0, CHUNK)
        inside = (row < num_rows)[:, None] & (k < DEPTH)[None, :]
        rows = tl.load(x + row[:, None] * x_stride + k[None, :], mask=inside, other=0)
        sums = tl.dot(rows, chunks[c], sums, input_precision="ieee")
    at = out + (row * num_parts + tl.program_id(1))[:, None] * WIDTH + column[None, :]
    tl.store(at, sums, mask=(row < num_rows)[:, None] & (column < WIDTH)[None, :])


def _fits(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `linear_parts` is worth it: few rows, weights w [N, K] with stride 1 along N, and a product that is large
    but not too deep."""
    width, depth = w.shape
    few = w.stride(0) == 1 and 0 < len(x) <= MOST_ROWS and x.itemsize == 2
    return few and PART < depth <= MOST_PARTS * PART and width > COLUMNS


def linear_parts(x: torch.Tensor, w: torch.Tensor) -> PartSum | None:
    """plugins/few_rows/reference.py's linear, with its result left in parts; None, and nothing is done, if the product
    is not one that this kernel is for.

    x [T, K] is contiguous in its last axis.
    """
    if not _fits(x, w):
        return None
    (rows, depth), width = x.shape, len(w)
    parts = triton.cdiv(depth, PART)
    out = torch.empty((rows, parts, width), dtype=torch.float32, device=x.device)
    block_t = max(16, triton.next_power_of_2(rows))
    parts_kernel[(triton.cdiv(width, COLUMNS), parts)](
        x, x.stride(0), rows, w, w.stride(1), parts, out,
        DEPTH=depth, WIDTH=width, PART=PART, CHUNK=CHUNK, BLOCK_T=block_t, BLOCK_N=COLUMNS,
        num_warps=8, **overlap(x),
    )  # fmt: skip
    return PartSum(out)
