"""How decode_hopper_kernel gets the rows of a context into shared memory, tile by tile, by the copy engine (TMA)."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

TILE_ROWS = 64
_ROWS = gl.constexpr(TILE_ROWS)
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name until Triton 3.6, and since


@gluon.jit
def find(table, stride, tile, exists, S: gl.constexpr):
    """Page of a tile, and the tile's first row in it."""
    row = tile * _ROWS
    return gl.load(table + stride * (row // S), exists, other=0), row % S


@gluon.jit
def copy(latent_rows, rope_rows, latents, ropes, latent_full, rope_full, index, place):
    """Asks for the tile that is `index`th in this program: its latent columns, and those of rope."""
    LATENT: gl.constexpr = latents.shape[3]
    stage = index % latents.shape[0]
    full = latent_full.index(stage)
    mbarrier.expect(full, latent_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(latent_rows, [place[0], place[1], 0], full, latents.index(stage))
    full = rope_full.index(stage)
    mbarrier.expect(full, rope_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(rope_rows, [place[0], place[1], LATENT], full, ropes.index(stage))


@gluon.jit
def fetch(
    pages, page_stride, row_stride, table, stride, begin, count, rows,
    S: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Has the first TILES of `count` tiles fetched into the L2, each by one thread of GROUPS warpgroups. That rows
    are written afterwards does no harm: writes take place there."""
    size: gl.constexpr = pages.dtype.element_ty.primitive_bitwidth // 8
    index = gl.arange(0, 128 * GROUPS, layout=gl.BlockedLayout([1], [32], [4 * GROUPS], [0]))
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
