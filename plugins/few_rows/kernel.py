"""Triton: products of few rows with weights, whose time is that of reading the weights.

T rows, K numbers each, N columns of the result; I inner columns of a gated activation. A program loads all weights of
its columns at once, before its rows are there, and holds them in registers; so all of the weights are in flight at the
same time. Then it reads all rows, from the L2 cache. Tiles are small, so warps divide the depth K, not the tile: each
multiplies its part of the depth, and the results are added at the end.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs
from splash_plugins.silu_mul.kernel import silu_mul

MOST_ROWS = 32
MOST_DEPTH = 4096
CHUNK = 1024
PARTS = 8


@triton.jit
def _depth(c: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """The indices into the depth of chunk c, [PARTS, 1, CHUNK / PARTS]."""
    part = tl.arange(0, PARTS)[:, None, None] * (CHUNK // PARTS)
    return c * CHUNK + part + tl.arange(0, CHUNK // PARTS)[None, None, :]


@triton.jit
def _weights(
    w, column, column_stride, depth_stride, columns, DEPTH: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr
):
    """The weights of some columns: [PARTS, BLOCK_N, CHUNK / PARTS] for each chunk of the depth."""
    chunks = ()
    rows = w + column.to(tl.int64)[None, :, None] * column_stride
    for c in tl.static_range((DEPTH + CHUNK - 1) // CHUNK):
        k = _depth(c, CHUNK, PARTS)
        inside = (column < columns)[None, :, None] & (k < DEPTH)
        chunk = tl.load(rows + k * depth_stride, mask=inside, other=0)
        chunks = chunks + (chunk,)  # type: ignore[assignment]
    return chunks


@triton.jit
def _product(
    x, row, row_stride, num_rows, chunks, DEPTH: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros((PARTS, BLOCK_T, BLOCK_N), tl.float32)
    for c in tl.static_range((DEPTH + CHUNK - 1) // CHUNK):
        k = _depth(c, CHUNK, PARTS)
        inside = (row < num_rows)[None, :, None] & (k < DEPTH)
        part = tl.load(x + row[None, :, None] * row_stride + k, mask=inside, other=0)
        sums = tl.dot(part, tl.permute(chunks[c], (0, 2, 1)), sums, input_precision="ieee")
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, x_stride, num_rows, w, column_stride, depth_stride, columns, out, out_stride,
    DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunks = _weights(w, column, column_stride, depth_stride, columns, DEPTH, CHUNK, PARTS)
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, BLOCK_T)
    sums = _product(x, row, x_stride, num_rows, chunks, DEPTH, CHUNK, PARTS, BLOCK_T, BLOCK_N)
    inside = (row < num_rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def gated_kernel(
    x, x_stride, num_rows, gate_up, inner, out,
    DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gates = _weights(gate_up, column, DEPTH, 1, inner, DEPTH, CHUNK, PARTS)
    ups = _weights(gate_up + inner * DEPTH, column, DEPTH, 1, inner, DEPTH, CHUNK, PARTS)
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, BLOCK_T)
    element = out.dtype.element_ty
    gate = _product(x, row, x_stride, num_rows, gates, DEPTH, CHUNK, PARTS, BLOCK_T, BLOCK_N).to(element).to(tl.float32)
    up = _product(x, row, x_stride, num_rows, ups, DEPTH, CHUNK, PARTS, BLOCK_T, BLOCK_N).to(element).to(tl.float32)
    inside = (row < num_rows)[:, None] & (column < inner)[None, :]
    tl.store(out + row[:, None] * inner + column[None, :], (gate * tl.sigmoid(gate) * up).to(element), mask=inside)


def cut_of(rows: int, depth: int, columns: int) -> tuple[int, int]:
    """(columns of a program, PARTS), measured on an H200; 0 columns where torch's product is at least as fast. Depths
    from 1,024 on were measured alone (perf/kernels_decode.py), smaller ones in whole steps, where torch's launches do
    not overlap with others."""
    if rows <= 16 and depth >= 1024 and columns <= 2048:
        return 16, PARTS
    if rows <= 16 and 512 <= depth < 1024 <= columns:
        return 32, PARTS // 2
    return 0, PARTS


def _fits(x: torch.Tensor) -> bool:
    return len(x) <= MOST_ROWS and x.shape[1] <= MOST_DEPTH and x.dtype.itemsize <= 2


def _tile(rows: int, depth: int, parts: int = PARTS) -> dict[str, int]:
    chunk = min(CHUNK, max(16 * parts, triton.next_power_of_2(depth)))
    block_t = max(16, triton.next_power_of_2(rows))
    return {"DEPTH": depth, "BLOCK_T": block_t, "CHUNK": chunk, "PARTS": parts, "num_warps": parts}


def linear(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, columns: int | None = None, parts: int = PARTS
) -> None:
    """As plugins/few_rows/reference.py; x and out are contiguous in their last axes, w in one of its two.

    columns and parts: in place of those that cut_of chooses.
    """
    rows, depth = x.shape
    if rows == 0:
        return
    if columns is None:
        columns, parts = cut_of(rows, depth, len(w)) if w.stride(1) == 1 else (0, parts)
    if columns == 0 or not _fits(x):
        torch.mm(x, w.t(), out=out)
        return
    linear_kernel[(triton.cdiv(len(w), columns),)](
        x, x.stride(0), rows, w, w.stride(0), w.stride(1), len(w), out, out.stride(0),
        BLOCK_N=columns, **_tile(rows, depth, parts), **overlap(x),
    )  # fmt: skip


def gated(x: torch.Tensor, gate_up: torch.Tensor, *, columns: int | None = None) -> torch.Tensor:
    """As plugins/few_rows/reference.py; gate_up is contiguous, x in its last axis."""
    rows, depth = x.shape
    inner = gate_up.shape[1]
    if columns is None:
        columns = cut_of(rows, depth, inner)[0] // 2 if depth >= 1024 else 0
    if columns == 0 or not _fits(x) or rows == 0:
        return silu_mul(torch.mm(x, gate_up.flatten(0, 1).t()))
    out = x.new_empty((rows, inner))
    gated_kernel[(triton.cdiv(inner, columns),)](
        x, x.stride(0), rows, gate_up, inner, out, BLOCK_N=columns, **_tile(rows, depth), **overlap(x),
    )  # fmt: skip
    return out
