"""How decode_hopper_kernel gets the rows of a context into shared memory, tile by tile, by the copy engine (TMA)."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

TILE_ROWS = 64
REST_ROWS = 16  # a context's last tile can be copied by so many rows
_ROWS = gl.constexpr(TILE_ROWS)
_REST = gl.constexpr(REST_ROWS)
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name until Triton 3.6, and since


@gluon.jit
def find(table, stride, tile, exists, S: gl.constexpr):
    """Page of a tile, and the tile's first row in it."""
    row = tile * _ROWS
    return gl.load(table + stride * (row // S), exists, other=0), row % S


@gluon.jit
def _copy(descriptor, rest_rows, buffers, barriers, index, place, live, column: gl.constexpr, REST: gl.constexpr):
    """Asks for a block of columns of the tile that is `index`th in this program, of whose rows `live` are some."""
    CHUNKS: gl.constexpr = buffers.shape[3] // 64
    STAGES: gl.constexpr = buffers.shape[0]
    GROUPS: gl.constexpr = _ROWS // _REST
    stage = index % STAGES
    barrier = barriers.index(stage)
    if REST and live <= _ROWS - _REST:
        # The widest swizzle takes 64 columns, and keeps 8 rows of them together: so a buffer is made of smaller ones.
        pieces = buffers._reinterpret(buffers.dtype, [STAGES * CHUNKS * GROUPS, 1, _REST, 64], buffers.layout)
        groups = gl.cdiv(live, _REST)
        for n in gl.static_range(1, GROUPS):
            if groups == n:
                mbarrier.expect(barrier, n * CHUNKS * rest_rows.block_type.nbytes)
        for n in range(groups):
            for chunk in gl.static_range(CHUNKS):
                target = pieces.index((stage * CHUNKS + chunk) * GROUPS + n)
                at = [place[0], place[1] + n * _REST, column + chunk * 64]
                tma.async_copy_global_to_shared(rest_rows, at, barrier, target)
    else:
        mbarrier.expect(barrier, descriptor.block_type.nbytes)
        tma.async_copy_global_to_shared(descriptor, [place[0], place[1], column], barrier, buffers.index(stage))


@gluon.jit
def copy_first(
    latent_rows, rope_rows, rest_rows, latents, ropes, latent_full, rope_full, places, live, count, REST: gl.constexpr
):  # fmt: skip
    """Asks for as many of this program's `count` tiles as there is room for; `places` are theirs, and `live` how many
    rows are there from the first one on."""
    LATENT: gl.constexpr = latents.shape[3]
    STAGES: gl.constexpr = latents.shape[0]
    for i in gl.static_range(STAGES):
        if i < count:
            rest = live - i * _ROWS
            _copy(latent_rows, rest_rows, latents, latent_full, i, places[i], rest, 0, REST)
            if i < ropes.shape[0]:
                _copy(rope_rows, rest_rows, ropes, rope_full, i, places[i], rest, LATENT, REST)


@gluon.jit
def copy_next(
    latent_rows, rope_rows, rest_rows, latents, ropes, latent_full, rope_full, place, rope_place, index, live, count,
    REST: gl.constexpr,
):  # fmt: skip
    """Once all are done with the tile that is `index`th, `live` rows before the end: asks for what takes its place."""
    LATENT: gl.constexpr = latents.shape[3]
    STAGES: gl.constexpr = latents.shape[0]
    ROPES: gl.constexpr = ropes.shape[0]
    meet()
    if index + STAGES < count:
        rest = live - STAGES * _ROWS
        _copy(latent_rows, rest_rows, latents, latent_full, index + STAGES, place, rest, 0, REST)
    if index + ROPES < count:
        rest = live - ROPES * _ROWS
        _copy(rope_rows, rest_rows, ropes, rope_full, index + ROPES, rope_place, rest, LATENT, REST)


@gluon.jit
def fetch(
    pages, page_stride, row_stride, table, stride, begin, count, rows,
    S: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Has the first TILES of `count` tiles fetched into the L2, each by one thread. That rows are written afterwards
    does no harm: writes take place there."""
    size: gl.constexpr = pages.dtype.element_ty.primitive_bitwidth // 8
    index = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    wanted = index < gl.minimum(TILES, count)
    first = (begin + index) * _ROWS
    page = gl.load(table + stride * (first // S), wanted, other=0).to(gl.int64)
    num_bytes = gl.where(wanted, gl.minimum(rows - first, _ROWS) * (WIDTH * size), 0)
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
