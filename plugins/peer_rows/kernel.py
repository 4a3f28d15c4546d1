"""Kernels in which all ranks meet and then read rows from each other's mailboxes: memory that every rank has mapped.

Each rank has a mailbox. `bases` [N] int64 (on the device): their addresses as this rank sees them, all 256-byte
aligned. What is to be read lies at the same byte offset `start` in all. A mailbox begins with its flags, int32:

    [rank r, block b]  how many meetings block b of rank r has come to, written by rank r
    [block b]          the same for this rank's own block b; no other rank reads it

Meeting. Block b of every rank adds one to its own count, writes the count to its place in every other mailbox, and
waits until its own mailbox shows the others' counts. So it goes on only when block b of every rank has begun; then all
that is before this kernel in every rank's stream is done and visible (release and acquire at system scope): a kernel
that starts while the one before it ends has waited for that one before it meets (wait_for_inputs). Counts live on the
device and are never reset, so a captured graph may be replayed among any other launches. A rank is at most one meeting
ahead of another's block, so the sign of the difference tells a count that has wrapped around from an old one. The grid
and the order of launches must be the same on all ranks. The wait has no timeout: if a rank never comes, the others'
kernels keep running, and the host waits for the step in vain.

Not all blocks have to run at the same time: block b waits for the other ranks' block b only, and a GPU starts blocks
in order.

Sums are taken in float32 (float64 for float64) in rank order: the same bits on every rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.overlap_kernel import wait_for_inputs

MAX_RANKS = 8
MAX_BLOCKS = 256
FLAG_BYTES = (MAX_RANKS + 1) * MAX_BLOCKS * 4


@triton.jit
def meet(bases, rank, SIZE: tl.constexpr, BLOCKS: tl.constexpr, RANKS: tl.constexpr):
    """Returns when this block of every rank has come here. What they wrote before that can then be read."""
    block = tl.program_id(0)
    own = tl.load(bases + rank).to(tl.pointer_type(tl.int32))
    count_at = own + RANKS * BLOCKS + block
    count = tl.load(count_at) + 1
    tl.debug_barrier()  # every thread's writes come before the one thread's release
    for peer in range(SIZE):
        if peer != rank:
            flags = tl.load(bases + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + rank * BLOCKS + block, count, sem="release", scope="sys")
    for peer in range(SIZE):
        if peer != rank:
            while tl.atomic_add(own + peer * BLOCKS + block, 0, sem="acquire", scope="sys") - count < 0:
                pass
    tl.debug_barrier()  # and the one thread's acquire before every thread's reads
    tl.store(count_at, count)


@triton.jit
def _at(bases, peer, start, like, ALIGN: tl.constexpr = 16):
    """A pointer of the type of `like` to byte `start`, a multiple of ALIGN, of rank `peer`'s mailbox."""
    return tl.multiple_of((tl.load(bases + peer) + start).to(like.dtype), ALIGN)


@triton.jit
def _wide(x):
    """x in float32, or in float64 if it is float64."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def meet_kernel(bases, rank, SIZE: tl.constexpr, BLOCKS: tl.constexpr, RANKS: tl.constexpr):
    meet(bases, rank, SIZE, BLOCKS, RANKS)


@triton.jit
def _tile(tile, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row indices of a tile, offsets of its numbers in [count, width], mask of those that exist)."""
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    return row, at, (row < count)[:, None] & (column < width)[None, :]


@triton.jit
def _parts(bases, start, like, begin, row, at, mask, num_rows, SIZE: tl.constexpr, SUMMED: tl.constexpr):
    """Every rank's numbers at offsets begin + at; SUMMED: only those of the rank that has summed the row already."""
    if SUMMED:
        owner = tl.minimum(row * SIZE // tl.maximum(num_rows, 1), SIZE - 1)
        source = tl.multiple_of((tl.load(bases + owner) + start).to(like.dtype), [16])
        parts = (tl.load(source[:, None] + at, mask=mask, other=0.0),)
    else:
        parts = ()  # type: ignore[assignment]
        for peer in tl.static_range(SIZE):
            part = tl.load(_at(bases, peer, start, like) + begin + at, mask=mask, other=0.0)
            parts = parts + (part,)  # type: ignore[assignment]
    return parts


@triton.jit(do_not_specialize=["rank", "start", "num_rows"])
def sum_rows_kernel(
    bases,
    start,
    hidden,
    weight,
    out,
    offsets,
    num_rows,
    width,
    eps,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    SPREAD: tl.constexpr,
    SUMMED: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """hidden [num_rows, width] += sum of all ranks' rows, then, with NORM, out = norm(hidden) * weight.

    SPREAD: hidden has only rows offsets[rank] … offsets[rank + 1] - 1 of those in the mailboxes. SUMMED: each rank has
    summed one slice of the rows already (sum_slice_kernel), and a row is read from the rank that has summed it.
    """
    column = tl.arange(0, COLUMNS)
    if NORM:
        scale = _wide(tl.load(weight + column, mask=column < width, other=0.0))
    wait_for_inputs(OVERLAP)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    first = 0
    count = num_rows
    if SPREAD:
        first = tl.load(offsets + rank)
        count = tl.minimum(tl.load(offsets + rank + 1) - first, num_rows)
    begin = first.to(tl.int64) * width if SPREAD else 0  # type: ignore[attr-defined]
    programs = tl.num_programs(0)
    tiles = tl.cdiv(count, ROWS)
    # The next tile's rows are requested while this one's are summed and normed.
    row, at, mask = _tile(tl.program_id(0), count, width, ROWS, COLUMNS)
    parts = _parts(bases, start, hidden, begin, row, at, mask, num_rows, SIZE, SUMMED)
    for tile in range(tl.program_id(0), tiles, programs):
        row, at, mask = _tile(tile, count, width, ROWS, COLUMNS)
        old = _wide(tl.load(hidden + at, mask=mask, other=0.0))
        total = _wide(parts[0])
        for i in tl.static_range(1, 1 if SUMMED else SIZE):
            total += _wide(parts[i])
        row, next_at, next_mask = _tile(tile + programs, count, width, ROWS, COLUMNS)
        parts = _parts(bases, start, hidden, begin, row, next_at, next_mask, num_rows, SIZE, SUMMED)
        new = (old + _wide(total.to(hidden.dtype.element_ty))).to(hidden.dtype.element_ty)
        tl.store(hidden + at, new, mask=mask)
        if NORM:
            x = _wide(new)
            x = x * (1 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps))[:, None]
            x = _wide(x.to(hidden.dtype.element_ty)) * scale[None, :]
            tl.store(out + at, x.to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rank", "start", "num_rows"])
def sum_slice_kernel(
    bases,
    start,
    like,
    num_rows,
    width,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Sums this rank's slice of the [num_rows, width] rows over all mailboxes, in place, in this rank's own mailbox.

    The slice is the rows with row * SIZE // num_rows = rank; no other rank reads those. `like` gives the dtype.
    """
    wait_for_inputs(OVERLAP)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    first = tl.cdiv(rank * num_rows, SIZE).to(tl.int64) * width
    end = tl.cdiv((rank + 1) * num_rows, SIZE).to(tl.int64) * width
    own = _at(bases, rank, start, like)
    for tile in range(tl.program_id(0), tl.cdiv(end - first, BLOCK), tl.num_programs(0)):
        at = first + (tile * BLOCK + tl.arange(0, BLOCK))
        total = _wide(tl.load(_at(bases, 0, start, like) + at, mask=at < end, other=0.0))
        for peer in tl.static_range(1, SIZE):
            total += _wide(tl.load(_at(bases, peer, start, like) + at, mask=at < end, other=0.0))
        tl.store(own + at, total.to(like.dtype.element_ty), mask=at < end)


@triton.jit(do_not_specialize=["rank", "start", "num_rows", "total"])
def gather_rows_kernel(
    bases,
    start,
    offsets,
    out,
    num_rows,
    total,
    width,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out [total, width]: all ranks' rows, stacked: of rank r its first offsets[r + 1] - offsets[r] rows, or num_rows
    of every rank without SPREAD."""
    wait_for_inputs(OVERLAP)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    end = total
    if SPREAD:
        end = tl.minimum(tl.load(offsets + SIZE), total)
    chunks = tl.cdiv(width, BLOCK)
    for item in range(tl.program_id(0), end * chunks, tl.num_programs(0)):
        row = item // chunks
        column = item % chunks * BLOCK + tl.arange(0, BLOCK)
        peer = 0
        first = 0
        for other in tl.static_range(1, SIZE):
            begin = tl.load(offsets + other) if SPREAD else num_rows * other
            peer = tl.where(row >= begin, other, peer)
            first = tl.where(row >= begin, begin, first)
        source = _at(bases, peer, start, out) + (row - first).to(tl.int64) * width
        x = tl.load(source + column, mask=column < width)
        tl.store(out + row.to(tl.int64) * width + column, x, mask=column < width)


@triton.jit(do_not_specialize=["rank", "start", "num_rows"])
def pick_rows_kernel(
    bases,
    sources,
    start,
    rank_of,
    index,
    sub_index,
    out,
    num_rows,
    width,
    stride,
    sub_stride,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    SUB: tl.constexpr,
    FILL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out[i] [width]: the numbers at sources[rank_of[i]] + start, index[i] * stride (+ sub_index[i] * sub_stride if
    SUB) numbers on. Where rank_of[i] is -1, zeros are written if FILL, else nothing."""
    wait_for_inputs(OVERLAP)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    chunks = tl.cdiv(width, BLOCK)
    for item in range(tl.program_id(0), num_rows * chunks, tl.num_programs(0)):
        row = item // chunks
        column = item % chunks * BLOCK + tl.arange(0, BLOCK)
        peer = tl.load(rank_of + row)
        target = out + row.to(tl.int64) * width + column
        if peer >= 0:
            at = tl.load(index + row).to(tl.int64) * stride
            if SUB:
                at += tl.load(sub_index + row).to(tl.int64) * sub_stride
            x = tl.load(_at(sources, peer, start, out, ALIGN) + at + column, mask=column < width)
            tl.store(target, x, mask=column < width)
        elif FILL:
            tl.store(target, tl.zeros((BLOCK,), out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["rank", "start", "num_rows"])
def to_owners_kernel(
    bases,
    start,
    owned,
    out,
    num_rows,
    heads,
    width,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Gathers all heads of the queries that this rank owns: out [num_rows, heads, width], whose row i is row owned[i]
    of every rank's q [A, h_r, width]. h_r: the heads cut evenly over ranks, the larger parts first. Where owned[i] is
    -1, nothing is written.
    """
    wait_for_inputs(OVERLAP)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    base = heads // SIZE
    extra = heads % SIZE
    for item in range(tl.program_id(0), num_rows * SIZE, tl.num_programs(0)):
        row = item // SIZE
        peer = item % SIZE
        token = tl.load(owned + row)
        if token >= 0:
            length = (base + (peer < extra).to(tl.int32)) * width
            first = (peer * base + tl.minimum(peer, extra)) * width
            source = _at(bases, peer, start, out) + token.to(tl.int64) * length
            target = out + row.to(tl.int64) * heads * width + first
            for begin in range(0, length, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                tl.store(target + column, tl.load(source + column, mask=column < length), mask=column < length)


@triton.jit(do_not_specialize=["rank", "start", "lse_start", "num_rows"])
def merge_parts_kernel(
    bases,
    start,
    lse_start,
    lse_like,
    offsets,
    out,
    num_rows,
    heads,
    width,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Merges attention over the ranks' parts of contexts: row i of out [num_rows, heads, width] is rows offsets[rank]
    + i of all ranks' results, weighted by the exp of their log-sum-exps. Results [T, heads, width] begin at `start`,
    log-sum-exps [T, heads] at `lse_start`. A result with log-sum-exp -inf is ignored, whatever it holds.
    """
    wait_for_inputs(OVERLAP)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    first = tl.load(offsets + rank) * heads
    count = tl.minimum(tl.load(offsets + rank + 1) * heads - first, num_rows * heads)
    column = tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        from_row = first + row
        from_at = at + first.to(tl.int64) * width
        top = tl.full((ROWS,), float("-inf"), lse_like.dtype.element_ty)
        weights = tl.zeros_like(top)
        total = tl.zeros((ROWS, COLUMNS), lse_like.dtype.element_ty)
        for peer in tl.static_range(SIZE):
            lse = tl.load(_at(bases, peer, lse_start, lse_like) + from_row, mask=row < count, other=float("-inf"))
            part = tl.load(_at(bases, peer, start, out) + from_at, mask=mask, other=0.0).to(total.dtype)
            part = tl.where((lse == float("-inf"))[:, None], 0.0, part)
            higher = tl.maximum(top, lse)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            before = tl.exp(top - shift)
            weight = tl.exp(lse - shift)
            total = total * before[:, None] + part * weight[:, None]
            weights = weights * before + weight
            top = higher
        merged = total / tl.where(weights == 0.0, 1.0, weights)[:, None]
        tl.store(out + at, merged.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rank", "start", "length"])
def gather_small_kernel(
    bases,
    start,
    x,
    out,
    length,
    rank,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANKS: tl.constexpr,
    MEET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """out [N, length]: every rank's x [length]. Block b of a rank puts into the mailbox exactly what block b of other
    ranks reads, so that one meeting is enough."""
    wait_for_inputs(OVERLAP)
    own = _at(bases, rank, start, out)
    for tile in range(tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(own + at, tl.load(x + at, mask=at < length), mask=at < length)
    if MEET:
        meet(bases, rank, SIZE, BLOCKS, RANKS)
    for tile in range(tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        for peer in tl.static_range(SIZE):
            y = tl.load(_at(bases, peer, start, out) + at, mask=at < length)
            tl.store(out + peer * length + at, y, mask=at < length)
