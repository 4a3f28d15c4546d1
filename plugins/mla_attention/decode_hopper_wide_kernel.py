"""Absorbed (decode) attention for Hopper with many heads, in Gluon: as decode_hopper_kernel, but by 64 heads a program.

64 heads fill the tensor cores' long side, so they take it, and a context's rows or latent columns the other, in which
two warpgroups share: 32 of a tile's rows each for the scores, 256 of the columns each for the sums of values, which 64
heads' worth of registers can hold. So shared memory is read less than with heads on the short side: there every
product of 32 heads would read the tile again.

A tile's weights take the place of its rope columns; two tiles are in shared memory, one being copied.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splash_plugins.mla_attention.cut import BLOCK_HEADS, TILE_ROWS
from splash_plugins.mla_attention.decode_copies_kernel import (
    ROPE,
    clear,
    copy,
    fetch,
    find,
    load_queries,
    meet,
    take,
)
from splash_plugins.overlap_kernel import wait_for_inputs

STAGES = 2
NUM_WARPS = 8
_HEADS = gl.constexpr(BLOCK_HEADS)
_STAGES = gl.constexpr(STAGES)
_ROWS = gl.constexpr(TILE_ROWS)
_ROPE = gl.constexpr(ROPE)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _scores(q_latent, q_rope, latent, rope, latent_full, rope_full, index, live):
    """The scores [64 heads, 64] of the tile that is `index`th in this program, of whose rows `live` are some; those
    past them are cleared, since they may hold what is no number, and 0 times that is none."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, _ROWS // 2, 16])
    phase = index // _STAGES & 1
    scores = gl.zeros([_HEADS, _ROWS], gl.float32, layout)
    mbarrier.wait(latent_full, phase)
    scores = warpgroup_mma(q_latent, latent.permute([1, 0]), scores, use_acc=False, is_async=True)
    mbarrier.wait(rope_full, phase)
    scores = warpgroup_mma(q_rope, rope.permute([1, 0]), scores, is_async=True)
    if live < _ROWS:
        clear(latent, live)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _softmax(scores, top, total, live, factor):
    """Online softmax over the tile's rows: (top [64], total [64, 64] by row of a tile, fade [64], weights)."""
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, scores.type.layout))
    scores = gl.where((row < live)[None, :], scores * factor, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    weight = gl.exp2(scores - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return new_top, total * fade[:, None] + weight, fade, weight


@gluon.jit
def _walk(
    q_latent, q_rope, latent_rows, rope_rows, latents, ropes, latent_full, rope_full,
    table, stride, begin, count, live, factor, S: gl.constexpr,
):  # fmt: skip
    """All of this program's tiles: (top [64], total [64, 64], sums [64, LATENT])."""
    LATENT: gl.constexpr = q_latent.shape[1]
    by_row: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, _ROWS // 2, 16])
    by_column: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    top = gl.full([_HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, by_row))
    total = gl.zeros([_HEADS, _ROWS], gl.float32, by_row)
    sums = gl.zeros([_HEADS, LATENT], gl.float32, by_column)
    for index in range(count):
        place = find(table, stride, begin + index + _STAGES, index + _STAGES < count, S)
        stage = index % _STAGES
        latent = latents.index(stage).reshape([_ROWS, LATENT])
        rope = ropes.index(stage).reshape([_ROWS, _ROPE])
        scores = _scores(q_latent, q_rope, latent, rope, latent_full.index(stage), rope_full.index(stage), index, live)
        top, total, fade, weight = _softmax(scores, top, total, live, factor)
        meet()  # all are done with the rope columns
        rope.store(weight.to(rope.dtype))
        sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, by_column))[:, None]
        fence_async_shared()
        meet()
        sums = warpgroup_mma(rope, latent, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        meet()  # all are done with the tile whose place the next one takes
        if index + _STAGES < count:
            copy(latent_rows, rope_rows, latents, ropes, latent_full, rope_full, index + _STAGES, place)
        live -= _ROWS
    return top, total, sums


@gluon.jit
def _normalised(top, total, sums):
    """(sums [64, LATENT] over the sum of weights, log-sum-exp [64])."""
    by_column: gl.constexpr = sums.type.layout
    whole = gl.sum(total, axis=1)
    divisor = gl.where(whole > 0, whole, 1.0)
    sums = sums / gl.convert_layout(divisor, gl.SliceLayout(1, by_column))[:, None]
    return sums, (top + gl.log2(divisor)) * _LN_2


@gluon.jit
def _write(sums, sum_lse, out, head_stride, lse, first, HEADS: gl.constexpr):
    """Of the heads from `first` on."""
    LATENT: gl.constexpr = sums.shape[1]
    by_column: gl.constexpr = sums.type.layout
    if lse is not None:
        head = first + gl.arange(0, _HEADS, layout=sum_lse.type.layout)
        gl.store(lse + head, sum_lse, head < HEADS)
    head = first + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, by_column))
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, by_column))
    to = out + head[:, None] * head_stride + column[None, :]
    gl.store(to, sums.to(out.dtype.element_ty), (head < HEADS)[:, None])


@gluon.jit(do_not_specialize=["table_stride", "stride", "lse_stride"])
def decode_hopper_wide_kernel(
    q, q_stride, q_head_stride,
    latent_rows, rope_rows, pages, page_stride, row_stride,
    tables, table_stride,
    slot, first, length, part, stride, scale,
    out, out_stride, out_head_stride,
    lse, lse_stride,
    partial, partial_lse,
    HEADS: gl.constexpr, LATENT: gl.constexpr, S: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As decode_hopper_kernel. A query's blocks of heads are neighbours: one finds the other's rows in the L2."""
    blocks: gl.constexpr = (HEADS + _HEADS - 1) // _HEADS
    index = gl.program_id(0) // blocks
    first_head = gl.program_id(0) % blocks * _HEADS
    read, query, whole, table, first_row, rows = take(part, index, slot, first, length, tables, table_stride)
    begin = first_row // _ROWS
    count = gl.cdiv(rows, _ROWS)
    places = ()
    for i in gl.static_range(_STAGES):
        place = find(table, stride, begin + i, i < count, S)
        places = places + (place,)  # type: ignore[assignment]

    dtype: gl.constexpr = q.dtype.element_ty
    matrix: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(dtype, [_STAGES, 1, _ROWS, LATENT], latent_rows.layout)
    ropes = gl.allocate_shared_memory(dtype, [_STAGES, 1, _ROWS, _ROPE], rope_rows.layout)
    q_latent = gl.allocate_shared_memory(dtype, [_HEADS, LATENT], matrix)
    q_rope = gl.allocate_shared_memory(dtype, [_HEADS, _ROPE], matrix)
    latent_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    rope_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(latent_full.index(stage), count=1)
        mbarrier.init(rope_full.index(stage), count=1)
    fence_async_shared()
    meet()

    if OVERLAP:
        fetch(pages, page_stride, row_stride, table, stride, begin, count, first_row + rows, S, LATENT + _ROPE, _STAGES)
    wait_for_inputs(OVERLAP)
    if read < 0:
        return
    for i in gl.static_range(_STAGES):
        if i < count:
            copy(latent_rows, rope_rows, latents, ropes, latent_full, rope_full, i, places[i])
    load_queries(q + query * q_stride, q_head_stride, first_head, q_latent, q_rope, HEADS)

    top, total, sums = _walk(
        q_latent, q_rope, latent_rows, rope_rows, latents, ropes, latent_full, rope_full,
        table, stride, begin, count, rows, scale * _LOG2_E, S,
    )  # fmt: skip
    sums, sum_lse = _normalised(top, total, sums)
    row = index.to(gl.int64) * HEADS
    partial += row * LATENT
    partial_lse += row
    if lse is not None:
        lse += query * lse_stride
    if out is None:
        _write(sums, sum_lse, partial, LATENT, partial_lse, first_head, HEADS)
    else:
        if whole:
            _write(sums, sum_lse, out + query * out_stride, out_head_stride, lse, first_head, HEADS)
        else:
            _write(sums, sum_lse, partial, LATENT, partial_lse, first_head, HEADS)
