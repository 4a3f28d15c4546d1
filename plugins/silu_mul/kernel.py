"""Triton: a gated MLP's activation. T tokens, I intermediate; n bytes a number. Reads 2TIn and writes TIn bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, row_stride, num_rows, out, inner, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if num_rows is not None:
        if row >= tl.load(num_rows):
            return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * inner + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
    """As plugins/silu_mul/reference.py; the last axis is contiguous.

    num_rows [1] int32: only the first num_rows rows are computed; the others stay undefined.
    """
    rows, width = gate_up.shape
    inner = width // 2
    out = gate_up.new_empty((rows, inner))
    if rows == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(inner))
    silu_mul_kernel[(rows, triton.cdiv(inner, block))](
        gate_up, gate_up.stride(0), num_rows, out, inner,
        BLOCK=block, num_warps=max(1, block // 256), **overlap(gate_up),
    )  # fmt: skip
    return out
