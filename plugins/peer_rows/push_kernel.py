"""Sums and gathers of few rows: each rank writes (pushes) its rows into the other ranks' memory, and the arrival of a
row is itself the signal that it is there.

Why: to meet first and then read costs three latencies, a signal's way to the other GPU, the read's way there and the
data's way back. Rows that are written to where they are needed cost one.

A reader must tell from a number alone whether it has arrived. Each rank has slots that are filled with zero bits.
Numbers are sent with their sign bit inverted, so that only -0 would be sent as zero bits; it is sent as 0 instead. The
reader polls until no number is zero bits, and then fills the slot with zero bits again.

There are two sets of slots and tokens, used in turn. A rank writes to a set for operation k + 2 only when its own k + 1
is done, for which it needed something of every other rank's k + 1: rows, a token (where a rank may have no rows for
it), or a meeting (in operations of kernel.py). The other rank sent that from a kernel that began after its k was done,
so the set that k used had been read there and was zero bits again. For the same reason, each of these operations is as
good as a meeting for everything that relies on one.

These kernels may begin while the kernel before them is still running, but they send nothing before it has ended
(wait_for_inputs): what is said above of a kernel's begin holds for the end of this wait. Conversely, the next kernel is
started only when all programs of this one have started and are past their wait. So it cannot take the place on the GPU
of a program that another rank waits for; it can hold up only its own successors.

Block b waits only for what block b of another rank sends, and sends all that it has to send before it waits. `bases`
[N] are the mailboxes; `start` is where the current slots begin in each, `tokens` where the current tokens do. Slots
hold what is sent as integers of the same size, INTEGER, whose sign bit is SIGN.

The rows to be summed over ranks may come in parts that have to be added up on this rank first. That is done once for
each row, by the program that sends or keeps it: where `partial` is None, row t is that of sum_pairs
(plugins/grouped_experts/product_kernel.py), rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.grouped_experts.product_kernel import sum_pairs
from splash_plugins.overlap_kernel import wait_for_inputs
from splash_plugins.peer_rows.kernel import _wide

# By the bytes of a number.
SIGN = {2: -(1 << 15), 4: -(1 << 31), 8: -(1 << 63)}


@triton.jit
def _slot(bases, rank, start, INTEGER: tl.constexpr):
    return tl.multiple_of((tl.load(bases + rank) + start).to(tl.pointer_type(INTEGER)), 16)


@triton.jit
def _sent(x, INTEGER: tl.constexpr, SIGN: tl.constexpr):
    bits = x.to(INTEGER, bitcast=True)
    return tl.where(bits == SIGN, SIGN, bits ^ SIGN).to(INTEGER)


@triton.jit
def _arrived(at, mask, like, INTEGER: tl.constexpr, SIGN: tl.constexpr):
    """Waits until all of what is sent to `at` has arrived, and returns it in like's dtype; leaves zero bits there."""
    bits = tl.load(at, mask=mask, other=1, volatile=True)
    while tl.max((bits == 0).to(tl.int32), axis=0) != 0:
        bits = tl.load(at, mask=mask, other=1, volatile=True)
    tl.debug_barrier()  # before any thread clears a number, all threads that poll it must have seen it
    tl.store(at, tl.zeros_like(bits), mask=mask)
    return (bits ^ SIGN).to(INTEGER).to(like.dtype.element_ty, bitcast=True)


@triton.jit
def _tokens(bases, tokens, rank, SIZE: tl.constexpr):
    """Sends a token to every other rank and waits for theirs; rank r's is written to tokens + 4 * r."""
    if tl.program_id(0) == 0:
        for peer in tl.static_range(SIZE):
            if peer != rank:
                tl.store(_slot(bases, peer, tokens, tl.int32) + rank, 1)
        for peer in tl.static_range(SIZE):
            if peer != rank:
                at = _slot(bases, rank, tokens, tl.int32) + peer
                while tl.load(at, volatile=True) == 0:
                    pass
                tl.debug_barrier()
                tl.store(at, 0)


@triton.jit
def _own_row(
    partial, y, choice, share, addend, addend_stride, first_expert, num_experts, row, column, mask, width, like,
    TOP_K: tl.constexpr,
):  # fmt: skip
    """This rank's part of a row that is to be summed over ranks, in like's dtype."""
    if partial is not None:
        value = tl.load(partial + row * width + column, mask=mask, other=0.0)
    else:
        value = sum_pairs(
            y, None, choice, share, addend, addend_stride, first_expert, num_experts, row, column, mask, width, TOP_K
        ).to(like.dtype.element_ty)
    return value


@triton.jit
def _add_row(total, hidden, scale, out, mask, width, eps, NORM: tl.constexpr):
    """hidden += total, and with NORM out = norm(hidden) * scale: one row, rounded as in kernel.sum_rows_kernel."""
    element = hidden.dtype.element_ty
    new = (_wide(tl.load(hidden, mask=mask, other=0.0)) + _wide(total.to(element))).to(element)
    tl.store(hidden, new, mask=mask)
    if NORM:
        x = _wide(new)
        x = x * (1 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps))
        tl.store(out, (_wide(x.to(element)) * scale).to(element), mask=mask)


@triton.jit(do_not_specialize=["rank", "start", "num_rows", "first_expert", "num_experts"])
def push_sum_rows_kernel(
    bases,
    start,
    partial,
    y,
    choice,
    share,
    addend,
    addend_stride,
    first_expert,
    num_experts,
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
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden [num_rows, width] += sum of all ranks' partial, and with NORM out = norm(hidden) * weight. partial may lie
    anywhere.

    share: the weight argument of sum_pairs. What rank r sends is written to start + r * SLOT_BYTES.
    """
    column = tl.arange(0, COLUMNS)
    mask = column < width
    scale = _wide(tl.load(weight + column, mask=mask, other=0.0)) if NORM else 0.0
    wait_for_inputs(OVERLAP)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = row * width + column
        mine = _own_row(
            partial, y, choice, share, addend, addend_stride, first_expert, num_experts, row, column, mask, width,
            hidden, TOP_K,
        )  # fmt: skip
        bits = _sent(mine, INTEGER, SIGN)
        for peer in tl.static_range(SIZE):
            if peer != rank:
                tl.store(_slot(bases, peer, start + rank * SLOT_BYTES, INTEGER) + at, bits, mask=mask)
        total = tl.zeros_like(_wide(mine))
        for peer in tl.static_range(SIZE):
            part = mine
            if peer != rank:
                slot = _slot(bases, rank, start + peer * SLOT_BYTES, INTEGER)
                part = _arrived(slot + at, mask, hidden, INTEGER, SIGN)
            total += _wide(part)
        _add_row(total, hidden + at, scale, out + at, mask, width, eps, NORM)


@triton.jit(do_not_specialize=["rank", "start", "tokens", "first_expert", "num_experts"])
def push_sum_spread_kernel(
    bases,
    start,
    tokens,
    partial,
    y,
    choice,
    share,
    addend,
    addend_stride,
    first_expert,
    num_experts,
    hidden,
    weight,
    out,
    offsets,
    width,
    eps,
    rank,
    SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    INTEGER: tl.constexpr,
    SIGN: tl.constexpr,
    NORM: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As push_sum_rows_kernel, but a rank's hidden has only rows offsets[rank] … offsets[rank + 1] - 1 of partial; the
    other rows are sent to the ranks that have them. Row i is handled by block i % (number of blocks) on every rank; so
    if there are as many blocks as rows, each block has one row to send or to receive."""
    column = tl.arange(0, COLUMNS)
    mask = column < width
    scale = _wide(tl.load(weight + column, mask=mask, other=0.0)) if NORM else 0.0
    firsts = ()
    for peer in tl.static_range(SIZE):
        firsts = firsts + (tl.load(offsets + peer),)  # type: ignore[assignment]
    num_rows = tl.load(offsets + SIZE)
    begin = tl.load(offsets + rank)
    end = tl.load(offsets + rank + 1)
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    wait_for_inputs(OVERLAP)
    for row in range(block, num_rows, blocks):
        if (row < begin) | (row >= end):
            owner = 0
            first = 0
            for peer in tl.static_range(1, SIZE):
                owner = tl.where(row >= firsts[peer], peer, owner)
                first = tl.where(row >= firsts[peer], firsts[peer], first)
            part = _own_row(
                partial, y, choice, share, addend, addend_stride, first_expert, num_experts, row, column, mask, width,
                hidden, TOP_K,
            )  # fmt: skip
            slot = _slot(bases, owner, start + rank * SLOT_BYTES, INTEGER)
            tl.store(slot + (row - first) * width + column, _sent(part, INTEGER, SIGN), mask=mask)
    _tokens(bases, tokens, rank, SIZE)
    for row in range(block + tl.cdiv(tl.maximum(begin - block, 0), blocks) * blocks, end, blocks):
        at = (row - begin) * width + column
        own = _own_row(
            partial, y, choice, share, addend, addend_stride, first_expert, num_experts, row, column, mask, width,
            hidden, TOP_K,
        )  # fmt: skip
        total = tl.zeros_like(_wide(own))
        for peer in tl.static_range(SIZE):
            part = own
            if peer != rank:
                slot = _slot(bases, rank, start + peer * SLOT_BYTES, INTEGER)
                part = _arrived(slot + at, mask, hidden, INTEGER, SIGN)
            total += _wide(part)
        _add_row(total, hidden + at, scale, out + at, mask, width, eps, NORM)


@triton.jit(do_not_specialize=["rank", "start", "tokens", "num_rows"])
def push_gather_kernel(
    bases,
    start,
    tokens,
    x,
    offsets,
    out,
    num_rows,
    width,
    rank,
    SIZE: tl.constexpr,
    INTEGER: tl.constexpr,
    SIGN: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [total, width]: all ranks' rows, stacked: of rank r the first offsets[r + 1] - offsets[r] rows of its x
    [num_rows, width], or all without SPREAD. Row i of the stack is sent to row i from start on."""
    wait_for_inputs(OVERLAP)
    chunks = tl.cdiv(width, BLOCK)
    first = tl.load(offsets + rank) if SPREAD else rank * num_rows
    count = tl.load(offsets + rank + 1) - first if SPREAD else num_rows
    for item in range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        row = item // chunks
        column = item % chunks * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + column, mask=column < width, other=0.0)
        bits = _sent(value, INTEGER, SIGN)
        at = (first + row) * width + column
        for peer in tl.static_range(SIZE):
            if peer != rank:
                tl.store(_slot(bases, peer, start, INTEGER) + at, bits, mask=column < width)
        tl.store(out + at, value, mask=column < width)
    _tokens(bases, tokens, rank, SIZE)
    slots = _slot(bases, rank, start, INTEGER)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            begin = tl.load(offsets + peer) if SPREAD else peer * num_rows
            length = tl.load(offsets + peer + 1) - begin if SPREAD else num_rows
            for item in range(tl.program_id(0), length * chunks, tl.num_programs(0)):
                column = item % chunks * BLOCK + tl.arange(0, BLOCK)
                at = (begin + item // chunks) * width + column
                value = _arrived(slots + at, column < width, out, INTEGER, SIGN)
                tl.store(out + at, value, mask=column < width)
