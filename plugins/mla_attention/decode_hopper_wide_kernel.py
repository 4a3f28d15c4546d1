"""Absorbed (decode) attention for Hopper with many heads, in Gluon: 64 heads a program, with specialised warps.

64 heads fill the tensor cores' long side; a context's rows, or latent columns, are on the short one. A producer warp
copies tiles of 32 rows into shared memory, four stages ahead (TMA). Two warpgroups take turns: warpgroup w computes
scores and softmax of tiles w, w + 2, w + 4, ..., and for all tiles the sums of values in its half of the latent
columns, since a warpgroup has registers for 256 of them with 64 heads. So each needs the other's weights too, and while
one computes a softmax, the other's products fill the tensor cores (as the "seesaw" of FlashMLA's dense Hopper kernel).

What a warpgroup hands over with a tile lies in shared memory as long as the tile's stage: the weights, in the place of
the tile's rope columns; the largest scores so far, with which the next tile's softmax begins; and the factor by which
sums before this tile are rescaled ("fade"). Barriers of a stage, in the order in which a tile passes them:

  full    the copy has landed
  ready   the weights of the tile's owner are there, and rows past the part's end are zero
  empty   both warpgroups have added the tile's values
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

WIDE_ROWS = 32  # rows of a tile
STAGES = 4
NUM_WARPS = 4  # in a warpgroup
_HEADS = gl.constexpr(BLOCK_HEADS)
_STAGES = gl.constexpr(STAGES)
_ROWS = gl.constexpr(WIDE_ROWS)
_ROPE = gl.constexpr(ROPE)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _copy(latent_rows, rope_rows, latents, ropes, full, tile, place):
    """Requests the copy of a tile: both halves of its latent columns, and its rope columns."""
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
    """Requests the copy of one query's heads from `first` on; zeros past the last."""
    HALF: gl.constexpr = q_latents.shape[3]
    mbarrier.expect(q_full, 2 * q_latent_heads.block_type.nbytes + q_rope_heads.block_type.nbytes)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(q_latent_heads, [query, first, half * HALF], q_full, q_latents.index(half))
    tma.async_copy_global_to_shared(q_rope_heads, [query, first, 2 * HALF], q_full, q_rope)


@gluon.jit
def _produce(latent_rows, rope_rows, latents, ropes, full, empty, table, stride, begin, count, S: gl.constexpr):
    """The producer warp: copies the tiles after the first _STAGES, which were requested before."""
    for tile in range(_STAGES, count):
        place = find(table, stride, begin + tile, tile < count, S, _ROWS)
        mbarrier.wait(empty.index(tile % _STAGES), tile // _STAGES & 1 ^ 1)
        _copy(latent_rows, rope_rows, latents, ropes, full, tile, place)


@gluon.jit
def _half_of(latents, stage, half):
    """One half of the latent columns of the tile in a stage, [32, LATENT / 2]."""
    return latents.index(stage * 2 + half).reshape([_ROWS, latents.shape[3]])


@gluon.jit
def _weights_of(ropes, stage):
    """The weights [64, 32] of the tile in a stage, in the place of its rope columns [32, 64]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return ropes.index(stage)._reinterpret(ropes.dtype, [_HEADS, _ROWS], layout)


@gluon.jit
def _zero(tile):
    """0, but the compiler cannot know: so it does not keep in registers what is computed from it for every tile."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [tile], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _issue_scores(q_latents, q_rope, latents, ropes, full, tile):
    """Starts a tile's scores [64 heads, 32]. Without `zero` the queries' descriptors took a third of the registers."""
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
    """Starts adding a tile's weighted values to `sums`, which are first rescaled by `fade`."""
    stage = tile % _STAGES
    sums = sums * fade[:, None]
    return warpgroup_mma(_weights_of(ropes, stage), _half_of(latents, stage, half), sums, is_async=True)


@gluon.jit
def _issue_others_values(latents, ropes, fades, ready, sums, tile, half: gl.constexpr):
    """The same for a tile of the other warpgroup, once that has handed it over."""
    stage = tile % _STAGES
    mbarrier.wait(ready.index(stage), tile // _STAGES & 1)
    fade = fades.index(stage).load(gl.SliceLayout(1, sums.type.layout))
    return _issue_values(latents, ropes, sums, fade, tile, half)


@gluon.jit
def _softmax(scores, before, live, factor):
    """(largest scores so far [64], weights) for a tile; `before` [64]: the largest scores before it."""
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, scores.type.layout))
    scores = gl.where((row < live)[None, :], scores * factor, float("-inf"))
    top = gl.maximum(before, gl.max(scores, axis=1))
    return top, gl.exp2(scores - top[:, None])


@gluon.jit
def _publish(weight, top, fade, latents, ropes, tops, fades, ready, tile, live):
    """Hands a tile to the other warpgroup. Rows past its first `live` are set to zero: they may be NaN, which a weight
    of 0 would not cancel."""
    stage = tile % _STAGES
    meet()  # all warps have computed their scores and no longer need the rope columns
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
    # One thread arrives for the warpgroup, but a warp knows only that its own products are done: so all meet first.
    meet()
    mbarrier.arrive(empty.index(tile % _STAGES), count=1)


@gluon.jit
def _hand_over(scores, before, own, total, latents, ropes, tops, fades, ready, tile, live, factor):
    """The softmax of one of this warpgroup's own tiles (its first `live` rows), handed over. Returns (top: the largest
    scores so far; fade: the factor that rescales sums relative to `before`, the largest scores before the tile, to top;
    total [64]: the sum of this warpgroup's weights relative to top, where the given total is relative to `own`)."""
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
    """The first tile, and the second one if it is this warpgroup's own. They are not done in `_walk`'s loop: there the
    assembler would wait for the scores before it rescales sums that did not come from a product."""
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
    """Goes through all `count` > 0 tiles: (largest scores [64], sum of weights [64] of this warpgroup's own tiles, sums
    of values [64, LATENT / 2]).

    An iteration handles an own tile and the other's tile before it, whose values are summed during the own one's
    softmax. No product is in flight when an iteration ends: else the assembler waits after every product.
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
    if (last > half) & (last % 2 != half):  # the last tile is the other's, and `_begin` has not added it
        sums = _issue_others_values(latents, ropes, fades, ready, sums, last, half)
        sums = warpgroup_mma_wait(0, deps=[sums])
        top = tops.index(last % _STAGES).load(own.type.layout)
    return top, total * gl.exp2(own - top), sums


@gluon.jit
def _write(sums, sum_lse, buffer, out, head_stride, lse, first, half: gl.constexpr, HEADS: gl.constexpr):
    """Writes normalised `sums` [64, LATENT / 2] to one half of `out`, heads `first` and on; through `buffer` in shared
    memory, if it has out's dtype, to write whole cache lines. Warpgroup 0 writes the log-sum-exps [64] too."""
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
    """One warpgroup: computes its half of the columns, normalises it and writes it, for the heads from `first` on, to
    `out` if there is one and the part is the query's whole context, else to `partial`."""
    HALF: gl.constexpr = latents.shape[3]
    mbarrier.wait(q_full, 0)
    top, mine, sums = _walk(
        q_latents, q_rope, latents, ropes, tops, fades, full, ready, empty, count, live, factor, half
    )
    totals.index(half).store(mine)
    meet()
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)  # both warpgroups are done, so that the queries' memory can be the buffer below
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
    """Initialises all barriers with the number of arrivals that they wait for."""
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
    """As decode_hopper_kernel. Descriptors are of q [A, H, W], by 64 heads, and of pages, by WIDE_ROWS rows, each by
    LATENT / 2 or 64 columns. A query's blocks of heads are neighbouring programs and share rows through the L2."""
    blocks: gl.constexpr = (HEADS + _HEADS - 1) // _HEADS
    index = gl.program_id(0) // blocks
    first_head = gl.program_id(0) % blocks * _HEADS
    read, query, whole, table, first_row, rows = take(part, index, slot, first, length, tables, table_stride)
    if read < 0:
        wait_for_inputs(OVERLAP)  # every program has to wait (overlap_kernel.py)
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
