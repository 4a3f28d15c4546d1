"""Triton: adds a layer's output to the residual and normalises the sum. One program a row, which stays in registers.

T tokens, D hidden; n bytes a number. Reads 2TDn and writes 2TDn bytes (half of each without delta).
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs


@triton.jit
def rms_scaled(x, weight, eps, size: tl.constexpr):
    """The RMS norm of x (float32, zeros past `size`), rounded to weight's dtype, times weight, as in ops.rms_norm."""
    inverse = tl.rsqrt(tl.sum(x * x) / size + eps)
    return (x * inverse).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def add_norm_kernel(
    hidden, hidden_stride, delta, delta_stride, weight, eps, out, out_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    w = tl.load(weight + column, mask=inside, other=0)
    wait_for_inputs(OVERLAP)
    x = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0)
    if delta is not None:
        added = tl.load(delta + row * delta_stride + column, mask=inside, other=0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(hidden + row * hidden_stride + column, x, mask=inside)
    y = rms_scaled(x.to(tl.float32), w, eps, SIZE)
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """As plugins/norm/reference.py; the last axes are contiguous. float32, bfloat16 or float16, all of one dtype."""
    rows, size = hidden.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    add_norm_kernel[(rows,)](
        hidden,
        hidden.stride(0),
        delta,
        delta.stride(0) if delta is not None else 0,
        weight,
        eps,
        out,
        out.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=norm_warps(block),
        **overlap(hidden),
    )


def norm_warps(block: int) -> int:
    """Warps for a row of `block` numbers: a thread takes 16 of each operand (two 16-byte loads), as far as 8 warps."""
    return max(1, min(8, block // 512))
