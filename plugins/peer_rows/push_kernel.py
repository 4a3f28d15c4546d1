"""The sum of few rows: each rank writes its own into the others' memory, whose arrival is its own signal.

To meet and then to read costs a signal's way to the other GPU, a read's way there and the way back. Rows that are
written to where they are needed take one way. Nothing else is sent, so the reader must tell from a number alone
whether it is there: each rank has a slot for every other, full of zero bits. Numbers are sent with their sign bit
turned, so that only -0 would be zero bits, and that goes as 0. The reader looks until no number is zero bits, and
leaves them so.

There are two sets of slots, used in turn. A rank writes to a set for operation k + 2 when its k + 1 is done, for which
it had to have something of every other rank's k + 1 (rows here, a meeting in other operations); that came from a kernel
that began when the rank's k was done, so the slots of k had been read and were zero bits again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.peer_rows.kernel import _wide

# The sign bit by the bytes of a number, as signed integers.
SIGN = {2: -(1 << 15), 4: -(1 << 31), 8: -(1 << 63)}


@triton.jit
def _slot(bases, rank, start, INTEGER: tl.constexpr):
    return tl.multiple_of((tl.load(bases + rank) + start).to(tl.pointer_type(INTEGER)), 16)


@triton.jit
def _arrived(at, mask):
    """What lies there once all of it has come; leaves zero bits."""
    bits = tl.load(at, mask=mask, other=1, volatile=True)
    while tl.max((bits == 0).to(tl.int32), axis=0) != 0:
        bits = tl.load(at, mask=mask, other=1, volatile=True)
    tl.store(at, tl.zeros_like(bits), mask=mask)
    return bits


@triton.jit(do_not_specialize=["rank", "start", "num_rows"])
def push_sum_rows_kernel(
    bases,
    start,
    partial,
    hidden,
    weight,
    out,
    num_rows,
    width,
    eps,
    rank,
    SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    INTEGER: tl.constexpr,
    SIGN: tl.constexpr,
    NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """hidden [num_rows, width] += partial of all ranks, out = norm(hidden) * weight, as kernel.sum_rows_kernel.

    bases [N]: the mailboxes; in each, rank r's slot of SLOT_BYTES lies at start + r * SLOT_BYTES. partial may lie
    anywhere. INTEGER: as wide as its numbers.
    """
    column = tl.arange(0, COLUMNS)
    mask = column < width
    if NORM:
        scale = _wide(tl.load(weight + column, mask=mask, other=0.0))
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = row * width + column
        mine = tl.load(partial + at, mask=mask, other=0.0).to(INTEGER, bitcast=True)
        mine = tl.where(mine == SIGN, SIGN, mine ^ SIGN).to(INTEGER)
        for peer in tl.static_range(SIZE):
            if peer != rank:
                tl.store(_slot(bases, peer, start + rank * SLOT_BYTES, INTEGER) + at, mine, mask=mask)
        old = _wide(tl.load(hidden + at, mask=mask, other=0.0))
        total = tl.zeros_like(old)
        for peer in tl.static_range(SIZE):
            part = mine
            if peer != rank:
                part = _arrived(_slot(bases, rank, start + peer * SLOT_BYTES, INTEGER) + at, mask)
            total += _wide((part ^ SIGN).to(INTEGER).to(hidden.dtype.element_ty, bitcast=True))
        new = (old + _wide(total.to(hidden.dtype.element_ty))).to(hidden.dtype.element_ty)
        tl.store(hidden + at, new, mask=mask)
        if NORM:
            x = _wide(new)
            x = x * (1 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps))
            x = _wide(x.to(hidden.dtype.element_ty)) * scale
            tl.store(out + at, x.to(hidden.dtype.element_ty), mask=mask)
