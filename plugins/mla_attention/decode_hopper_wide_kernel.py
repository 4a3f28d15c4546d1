"""Absorbed (decode) attention for Hopper with many heads, in Gluon: 64 a program, with the warps' work cut by hand.

64 heads fill the tensor cores' long side, so they take it, and a context's rows or latent columns the other. A warp
copies tiles of 32 rows into shared memory, four stages ahead (TMA). Two warpgroups use them in turns: warpgroup w has
the scores and the softmax of tiles w, w + 2, w + 4, ..., and of all tiles the sums of values of its half of the latent
columns, since one alone has registers for 256 of them with 64 heads. So each hands the other its tiles' weights, and
while one softmaxes, the other's products fill the tensor cores (the seesaw of FlashMLA's dense kernel for Hopper).

What is handed over with a tile lies in shared memory too, and lives as long as its stage: its weights, in the place of
its rope columns; the largest scores so far, which the next tile's softmax begins with; and by what the sums before this
tile are scaled ("fade"). Barriers of a stage, in the order in which a tile passes them:

  full    the copy has landed
  ready   its owner's weights are there, and the rows past the context's end cleared
  empty   both warpgroups have added its values
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splash_plugins.mla_attention.cut import BLOCK_HEADS
from splash_plugins.mla_attention.decode_parts_kernel import ROPE, clear, fetch, find, meet, seek, take, write_nothing
from splash_plugins.overlap_kernel import wait_for_inputs

WIDE_ROWS = 32  # rows a tile
STAGES = 4
NUM_WARPS = 4  # of a warpgroup
_HEADS = gl.constexpr(BLOCK_HEADS)
_STAGES = gl.constexpr(STAGES)
_ROWS = gl.constexpr(WIDE_ROWS)
_ROPE = gl.constexpr(ROPE)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _copy(latent_rows, rope_rows, latents, ropes, full, tile, place):
    """Asks for a tile: both halves of its latent columns, and those of rope."""
    HALF: gl.constexpr = latents.shape[3]
    stage = tile % _STAGES
    barrier = full.index(stage)
    mbarrier.expect(barrier, 2 * latent_rows.block_type.nbytes + rope_rows.block_type.nbytes)
    for half in gl.static_range(2):
        target = latents.index(stage * 2 + half)
        tma.async_copy_global_to_shared(latent_rows, [place[0], place[1], half * HALF], barrier, target)
    tma.async_copy_global_to_shared(rope_rows, [place[0], place[1], 2 * HALF], barrier, ropes.index(stage))


@gluon.jit
def _copy_queries(q_latent_heads, q_rope_heads, q_latents, q_rope, q_full, query, first):
    """Asks for one query's heads from `first` on; zeros past the last."""
    HALF: gl.constexpr = q_latents.shape[3]
    mbarrier.expect(q_full, 2 * q_latent_heads.block_type.nbytes + q_rope_heads.block_type.nbytes)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(q_latent_heads, [query, first, half * HALF], q_full, q_latents.index(half))
    tma.async_copy_global_to_shared(q_rope_heads, [query, first, 2 * HALF], q_full, q_rope)


@gluon.jit
def _produce(latent_rows, rope_rows, latents, ropes, full, empty, table, stride, begin, count, S: gl.constexpr):
    """Copies the tiles past the first ones, which are under way already."""
    for tile in range(_STAGES, count):
        place = find(table, stride, begin + tile, tile < count, S, _ROWS)
        mbarrier.wait(empty.index(tile % _STAGES), tile // _STAGES & 1 ^ 1)
        _copy(latent_rows, rope_rows, latents, ropes, full, tile, place)


@gluon.jit
def _half_of(latents, stage, half):
    """[32, LATENT / 2]"""
    return latents.index(stage * 2 + half).reshape([_ROWS, latents.shape[3]])


@gluon.jit
def _weights_of(ropes, stage):
    """[64, 32], in the place of a tile's rope columns [32, 64]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return ropes.index(stage)._reinterpret(ropes.dtype, [_HEADS, _ROWS], layout)


@gluon.jit
def _zero(tile):
    """0, but the compiler does not know: what is computed with it is not kept in registers from tile to tile."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [tile], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _issue_scores(q_latents, q_rope, latents, ropes, full, tile):
    """Begins a tile's scores [64 heads, 32]. The queries' descriptors would take a third of the registers."""
    HALF: gl.constexpr = latents.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    stage = tile % _STAGES
    zero = _zero(tile)
    scores = gl.zeros([_HEADS, _ROWS], gl.float32, layout)
    mbarrier.wait(full.index(stage), tile // _STAGES & 1)
    rope = ropes.index(stage).reshape([_ROWS, _ROPE])
    queries = q_rope.reshape([_HEADS, _ROPE])
    scores = warpgroup_mma(queries, rope.permute([1, 0]), scores, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        queries = q_latents.index(half + zero).reshape([_HEADS, HALF])
        latent = _half_of(latents, stage, half)
        scores = warpgroup_mma(queries, latent.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
def _issue_values(latents, ropes, sums, fade, tile, half: gl.constexpr):
    """Begins to add a tile's values to `sums`, which are scaled by `fade` before."""
    stage = tile % _STAGES
    sums = sums * fade[:, None]
    return warpgroup_mma(_weights_of(ropes, stage), _half_of(latents, stage, half), sums, is_async=True)


@gluon.jit
def _issue_others_values(latents, ropes, fades, ready, sums, tile, half: gl.constexpr):
    """The same for a tile of the other warpgroup."""
    stage = tile % _STAGES
    mbarrier.wait(ready.index(stage), tile // _STAGES & 1)
    fade = fades.index(stage).load(gl.SliceLayout(1, sums.type.layout))
    return _issue_values(latents, ropes, sums, fade, tile, half)


@gluon.jit
def _softmax(scores, before, live, factor):
    """(largest scores so far, weights) of a tile, `before` [64] being those of the tile before it."""
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, scores.type.layout))
    scores = gl.where((row < live)[None, :], scores * factor, float("-inf"))
    top = gl.maximum(before, gl.max(scores, axis=1))
    return top, gl.exp2(scores - top[:, None])


@gluon.jit
def _publish(weight, top, fade, latents, ropes, tops, fades, ready, tile, live):
    """Hands a tile to the other warpgroup. Rows past its `live` ones may hold what is no number, and 0 times that is
    none: they are cleared."""
    stage = tile % _STAGES
    meet()  # all warps' scores are done with the rope columns
    _weights_of(ropes, stage).store(weight.to(ropes.dtype))
    tops.index(stage).store(top)
    fades.index(stage).store(fade)
    if live < _ROWS:
        for half in gl.static_range(2):
            clear(_half_of(latents, stage, half), live)
    fence_async_shared()
    meet()
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _release(empty, tile):
    # One thread arrives for the warpgroup, and each warp knows of its own products only.
    meet()
    mbarrier.arrive(empty.index(tile % _STAGES), count=1)


@gluon.jit
def _hand_over(scores, before, own, total, latents, ropes, tops, fades, ready, tile, live, factor):
    """Softmaxes an own tile, of whose rows `live` are some, and publishes it. Returns (largest scores so far, fade,
    total), the latter two relative to the former: `fade` from `before`, the largest scores of the tile before, on, and
    `total` [64], the sum of this warpgroup's weights, which was relative to `own`."""
    top, weight = _softmax(scores, before, live, factor)
    fade = gl.exp2(before - top)
    _publish(weight, top, fade, latents, ropes, tops, fades, ready, tile, live)
    return top, fade, total * gl.exp2(own - top) + gl.sum(weight, axis=1)


@gluon.jit
def _add_own_values(latents, ropes, empty, sums, fade, tile, half: gl.constexpr):
    fade = gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))
    sums = _issue_values(latents, ropes, sums, fade, tile, half)
    sums = warpgroup_mma_wait(0, deps=[sums])
    _release(empty, tile)
    return sums


@gluon.jit
def _begin(
    q_latents, q_rope, latents, ropes, tops, fades, full, ready, empty, count, live, factor, half: gl.constexpr,
):  # fmt: skip
    """What `_walk` begins with: the first tile, and the second if it is this warpgroup's own. They are no step of its
    loop: there the assembler would wait for the scores before it scales sums that did not come from a product."""
    HALF: gl.constexpr = latents.shape[3]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    own = gl.full([_HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([_HEADS], gl.float32, gl.SliceLayout(1, score_layout))
    sums = gl.zeros([_HEADS, HALF], gl.float32, value_layout)
    if half == 0:
        scores = _issue_scores(q_latents, q_rope, latents, ropes, full, 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        own, fade, total = _hand_over(scores, own, own, total, latents, ropes, tops, fades, ready, 0, live, factor)
        sums = _add_own_values(latents, ropes, empty, sums, fade, 0, half)
    else:
        scores = gl.zeros([_HEADS, _ROWS], gl.float32, score_layout)
        if count > 1:
            scores = _issue_scores(q_latents, q_rope, latents, ropes, full, 1)
            scores = warpgroup_mma_wait(0, deps=[scores])
        sums = _issue_others_values(latents, ropes, fades, ready, sums, 0, half)
        own = tops.index(0).load(own.type.layout)
        sums = warpgroup_mma_wait(0, deps=[sums])
        _release(empty, 0)
        if count > 1:
            own, fade, total = _hand_over(
                scores, own, own, total, latents, ropes, tops, fades, ready, 1, live - _ROWS, factor
            )
            sums = _add_own_values(latents, ropes, empty, sums, fade, 1, half)
    return own, total, sums


@gluon.jit
def _walk(
    q_latents, q_rope, latents, ropes, tops, fades, full, ready, empty, count, live, factor, half: gl.constexpr,
):  # fmt: skip
    """All of this program's tiles, `count` > 0: (largest scores [64], sum of the weights of this warpgroup's own tiles
    [64], sums of values [64, LATENT / 2]).

    A step takes a tile of its own, and before that the one before: its values are summed while this one is softmaxed.
    Nothing is under way when a step ends: else the assembler waits after every product.
    """
    own, total, sums = _begin(
        q_latents, q_rope, latents, ropes, tops, fades, full, ready, empty, count, live, factor, half
    )
    for tile in range(2 + half, count, 2):
        before = tile - 1
        scores = _issue_scores(q_latents, q_rope, latents, ropes, full, tile)
        sums = _issue_others_values(latents, ropes, fades, ready, sums, before, half)
        top = tops.index(before % _STAGES).load(own.type.layout)
        scores = warpgroup_mma_wait(1, deps=[scores])
        own, fade, total = _hand_over(
            scores, top, own, total, latents, ropes, tops, fades, ready, tile, live - tile * _ROWS, factor
        )
        sums = warpgroup_mma_wait(0, deps=[sums])
        _release(empty, before)
        sums = _add_own_values(latents, ropes, empty, sums, fade, tile, half)
    last = count - 1
    top = own
    if (last > half) & (last % 2 != half):  # the other's, and not the first
        sums = _issue_others_values(latents, ropes, fades, ready, sums, last, half)
        sums = warpgroup_mma_wait(0, deps=[sums])
        top = tops.index(last % _STAGES).load(own.type.layout)
    return top, total * gl.exp2(own - top), sums


@gluon.jit
def _write(sums, sum_lse, buffer, out, head_stride, lse, first, half: gl.constexpr, HEADS: gl.constexpr):
    """Normalised `sums` [64, LATENT / 2] to their half of `out`, by `buffer` in shared memory if that is of its type,
    for whole lines; of the heads from `first` on. The first warpgroup writes their log-sum-exp [64] too."""
    if half == 0:
        if lse is not None:
            head = first + gl.arange(0, _HEADS, layout=sum_lse.type.layout)
            gl.store(lse + head, sum_lse, head < HEADS)
    HALF: gl.constexpr = sums.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    results = sums.to(dtype)
    if dtype == buffer.dtype:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
        buffer.store(results)
        meet()
        results = buffer.load(layout)
    head = first + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, results.type.layout))
    column = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, results.type.layout))
    gl.store(out + head[:, None] * head_stride + column[None, :], results, (head < HEADS)[:, None])


@gluon.jit
def _consume(
    q_latents, q_rope, latents, ropes, tops, fades, totals, q_full, full, ready, empty, done,
    count, live, factor, whole, out, head_stride, lse, partial, partial_lse, first,
    half: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: walks, then normalises and writes its half of the columns, of the heads from `first` on: to `out`
    if there is one and the part is the whole context, else to `partial`."""
    HALF: gl.constexpr = latents.shape[3]
    mbarrier.wait(q_full, 0)
    top, mine, sums = _walk(
        q_latents, q_rope, latents, ropes, tops, fades, full, ready, empty, count, live, factor, half
    )
    totals.index(half).store(mine)
    meet()
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)  # by both: nobody needs the queries any more either
    total = mine + totals.index(1 - half).load(mine.type.layout)
    divisor = gl.where(total > 0, total, 1.0)
    sum_lse = (top + gl.log2(divisor)) * _LN_2
    sums = sums * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, sums.type.layout))[:, None]
    buffer = q_latents.index(half).reshape([_HEADS, HALF])
    if out is None:
        _write(sums, sum_lse, buffer, partial, 2 * HALF, partial_lse, first, half, HEADS)
    else:
        if whole:
            _write(sums, sum_lse, buffer, out, head_stride, lse, first, half, HEADS)
        else:
            _write(sums, sum_lse, buffer, partial, 2 * HALF, partial_lse, first, half, HEADS)


@gluon.jit
def _set_up(q_full, done, full, ready, empty):
    """All barriers, with how many arrivals they wait for."""
    mbarrier.init(q_full, count=1)
    mbarrier.init(done, count=2)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)


@gluon.jit(do_not_specialize=["table_stride", "stride", "lse_stride"])
def decode_hopper_wide_kernel(
    q_latent_heads, q_rope_heads, latent_rows, rope_rows, pages, page_stride, row_stride,
    tables, table_stride,
    slot, first, length, part, stride, scale,
    out, out_stride, out_head_stride,
    lse, lse_stride,
    partial, partial_lse,
    HEADS: gl.constexpr, LATENT: gl.constexpr, S: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As decode_hopper_kernel. Descriptors are of q [A, H, W] by blocks of 64 heads and of pages by WIDE_ROWS rows, of
    LATENT / 2 or 64 columns. A query's blocks of heads are neighbours: one finds the other's rows in the L2."""
    blocks: gl.constexpr = (HEADS + _HEADS - 1) // _HEADS
    index = gl.program_id(0) // blocks
    first_head = gl.program_id(0) % blocks * _HEADS
    read, query, whole, table, first_row, rows = take(part, index, slot, first, length, tables, table_stride)
    if read < 0:
        wait_for_inputs(OVERLAP)  # else what comes next might begin before what came before has ended
        return
    begin = first_row // _ROWS
    count = gl.cdiv(rows, _ROWS)
    places = seek(table, stride, begin, count, S, _ROWS, _STAGES)

    HALF: gl.constexpr = LATENT // 2
    dtype: gl.constexpr = latent_rows.dtype
    latents = gl.allocate_shared_memory(dtype, [_STAGES * 2, 1, _ROWS, HALF], latent_rows.layout)
    ropes = gl.allocate_shared_memory(dtype, [_STAGES, 1, _ROWS, _ROPE], rope_rows.layout)
    q_latents = gl.allocate_shared_memory(dtype, [2, 1, _HEADS, HALF], q_latent_heads.layout)
    q_rope = gl.allocate_shared_memory(dtype, [1, _HEADS, _ROPE], q_rope_heads.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tops = gl.allocate_shared_memory(gl.float32, [_STAGES, _HEADS], plain)
    fades = gl.allocate_shared_memory(gl.float32, [_STAGES, _HEADS], plain)
    totals = gl.allocate_shared_memory(gl.float32, [2, _HEADS], plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    _set_up(q_full, done, full, ready, empty)
    fence_async_shared()
    meet()

    if OVERLAP:
        end = first_row + rows
        fetch(pages, page_stride, row_stride, table, stride, begin, count, end, S, LATENT + _ROPE, _STAGES, _ROWS)
    wait_for_inputs(OVERLAP)
    row = index.to(gl.int64) * HEADS
    partial += row * LATENT
    partial_lse += row
    if out is not None:
        out += query * out_stride
    if lse is not None:
        lse += query * lse_stride
    if count == 0:
        if out is not None:
            write_nothing(out, out_head_stride, lse, first_head, _HEADS, HEADS, LATENT)
        else:
            write_nothing(partial, LATENT, partial_lse, first_head, _HEADS, HEADS, LATENT)
        return
    _copy_queries(q_latent_heads, q_rope_heads, q_latents, q_rope, q_full, query.to(gl.int32), first_head)
    for i in gl.static_range(_STAGES):
        if i < count:
            _copy(latent_rows, rope_rows, latents, ropes, full, i, places[i])
    factor = scale * _LOG2_E
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                q_latents, q_rope, latents, ropes, tops, fades, totals, q_full, full, ready, empty, done,
                count, rows, factor, whole, out, out_head_stride, lse, partial, partial_lse, first_head, zero, HEADS,
            )),
            (_consume, (
                q_latents, q_rope, latents, ropes, tops, fades, totals, q_full, full, ready, empty, done,
                count, rows, factor, whole, out, out_head_stride, lse, partial, partial_lse, first_head, one, HEADS,
            )),
            (_produce, (latent_rows, rope_rows, latents, ropes, full, empty, table, stride, begin, count, S)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
