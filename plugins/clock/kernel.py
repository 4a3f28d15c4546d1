"""Triton: writes the GPU's time to memory, in the stream's order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def stamp_kernel(out):
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out, now)


def stamp(out: torch.Tensor) -> None:
    """out [1] int64: nanoseconds, counted from the same moment on all GPUs of a host."""
    stamp_kernel[(1,)](out, num_warps=1)
