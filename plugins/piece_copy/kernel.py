"""Triton: copies many small pieces of memory, of this GPU and of peers whose memory is mapped, in one launch.

For pieces that are too small for a copy engine, which needs a command for each: a cache row is one piece in each layer.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 8192
WIDEST = 16  # bytes that a thread reads at once
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@triton.jit(do_not_specialize=["count"])
def piece_copy_kernel(
    pieces, count, INTEGER: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """pieces [count, 3] int64: source, target, bytes. A program copies every num_programs-th piece.

    INTEGER has SIZE bytes; a thread reads WIDE of them at once, and SIZE * WIDE divides every address and length.
    """
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.multiple_of(tl.load(pieces + piece * 3).to(tl.pointer_type(INTEGER)), SIZE * WIDE)
        target = tl.multiple_of(tl.load(pieces + piece * 3 + 1).to(tl.pointer_type(INTEGER)), SIZE * WIDE)
        length = tl.multiple_of(tl.load(pieces + piece * 3 + 2) // (SIZE * WIDE) * WIDE, WIDE)
        for first in range(0, length, BLOCK):
            index = first + tl.arange(0, BLOCK)
            x = tl.load(source + index, mask=index < length)
            tl.store(target + index, x, mask=index < length)


def piece_copy(pieces: torch.Tensor, unit: int, programs: int) -> None:
    """As plugins/piece_copy/reference.py, but pieces are on the device and are not checked."""
    assert pieces.dtype is torch.int64 and pieces.is_contiguous() and unit in (1, 2, 4, 8, WIDEST), unit
    size = min(unit, 4)
    if len(pieces):
        piece_copy_kernel[(min(len(pieces), programs),)](
            pieces,
            len(pieces),
            INTEGER=_INTEGERS[size],
            SIZE=size,
            WIDE=unit // size,
            BLOCK=BLOCK_BYTES // size,
            num_warps=4,
        )
