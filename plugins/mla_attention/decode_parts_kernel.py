"""What Hopper's decode kernels have in common: looking up a program's part of a context, finding the page of a tile,
prefetching rows into the L2 cache, and clearing rows in shared memory that do not belong to the part."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROPE = 64
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name until Triton 3.6, and since


@gluon.jit
def take(part, index, slot, first, length, tables, table_stride):
    """Looks up part `index`. Returns (its query, -1 for padding; the query as an index that is always valid; whether
    the part is the query's whole context; a pointer to the context's first entry in the block tables; the part's first
    row; its number of rows)."""
    read = gl.load(part + 3 * index)
    begin = gl.load(part + 3 * index + 1)
    rows = gl.load(part + 3 * index + 2)
    query = gl.maximum(read, 0).to(gl.int64)
    table = tables + gl.load(slot + query).to(gl.int64) * table_stride + gl.load(first + query)
    return read, query, rows == gl.load(length + query), table, begin, rows


@gluon.jit
def find(table, stride, tile, exists, S: gl.constexpr, ROWS: gl.constexpr):
    """(page, first row in the page) of a tile of ROWS rows of the context."""
    row = tile * ROWS
    return gl.load(table + stride * (row // S), exists, other=0), row % S


@gluon.jit
def seek(table, stride, begin, count, S: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr):
    """`find` for the first TILES of the `count` tiles that begin with tile `begin`."""
    places = ()
    for i in gl.static_range(TILES):
        place = find(table, stride, begin + i, i < count, S, ROWS)
        places = places + (place,)  # type: ignore[assignment]
    return places


@gluon.jit
def fetch(
    pages, page_stride, row_stride, table, stride, begin, count, rows,
    S: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Prefetches the first TILES of `count` tiles of ROWS rows into the L2 cache, one thread a tile. A row may still be
    written after that: writes go to the L2 too, so what is read there later is right."""
    size: gl.constexpr = pages.dtype.element_ty.primitive_bitwidth // 8
    index = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    wanted = index < gl.minimum(TILES, count)
    first = (begin + index) * ROWS
    page = gl.load(table + stride * (first // S), wanted, other=0).to(gl.int64)
    num_bytes = gl.where(wanted, gl.minimum(rows - first, ROWS) * (WIDTH * size), 0)
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [pages + page * page_stride + (first % S) * row_stride, num_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def clear(block, live):
    """Sets the rows from `live` on of a block [rows, columns] in shared memory to zero."""
    ROWS: gl.constexpr = block.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    for first in gl.static_range(0, ROWS, 8):
        if first + 8 > live:
            kept = first + gl.arange(0, 8, layout=gl.SliceLayout(1, layout)) < live
            part = block.slice(first, 8)
            numbers = part.load(layout)
            part.store(gl.where(kept[:, None], numbers, gl.zeros_like(numbers)))


@gluon.jit
def write_nothing(out, head_stride, lse, first, BLOCK_H: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr):
    """Writes the result of attention to an empty context, 0 and log-sum-exp -inf, for BLOCK_H heads from `first` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    head = first + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([BLOCK_H, LATENT], out.dtype.element_ty, layout)
    gl.store(out + head[:, None] * head_stride + column[None, :], zeros, (head < HEADS)[:, None])
    if lse is not None:
        gl.store(lse + head, gl.full([BLOCK_H], float("-inf"), gl.float32, head.type.layout), head < HEADS)
