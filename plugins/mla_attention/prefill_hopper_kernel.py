"""Expanded (prefill) attention for Hopper, in Gluon: as prefill_kernel, with specialised warps.

A program (a block of threads) has a producer warp, which copies keys and values into shared memory, two stages ahead
(TMA), and two consumer warpgroups, each with 64 queries of the tile. Consumers synchronise with the producer, through
barriers in shared memory, but not with each other (FlashAttention-3, Shah et al., arXiv:2407.08608): while one computes
a softmax, the other's products fill the tensor cores. Within a warpgroup, the values of block j - 1 are summed during
the softmax of block j (section 3.2 there).

Head dims are multiples of 64. Keys come in chunks of 64 columns: those of the nope part, then the shared rope part.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splash_plugins.mla_attention.prefill_kernel import HEAD_GROUP, LOG2_E
from splash_plugins.mla_attention.tiles import PREFILL_TILE

CHUNK = 64  # columns of a head dim that are copied together: 128 bytes, the widest swizzle
STAGES = 2
HALF = gl.constexpr(64)  # queries of a warpgroup: half a tile
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name until Triton 3.6, and since
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


@gluon.jit
def _place(num_tiles, heads, GROUP: gl.constexpr):
    """As prefill_kernel._place."""
    program = gl.program_id(0)
    first = program // (num_tiles * GROUP) * GROUP
    size = min(heads - first, GROUP)
    place = program - num_tiles * first
    return place // size, first + place % size


@gluon.jit
def _clear(block, begin):
    """Sets the rows from `begin` on of a block [BLOCK_N, VD] in shared memory to zero. The producer warp does it, few
    numbers at a time: it has few registers."""
    BLOCK_N: gl.constexpr = block.shape[0]
    VALUE: gl.constexpr = block.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, 8):
        if first + 8 > begin:
            kept = first + gl.arange(0, 8, layout=gl.SliceLayout(1, layout)) < begin
            for column in gl.static_range(0, VALUE, 64):
                part = block.slice(first, 8).slice(column, 64, dim=1)
                numbers = part.load(layout)
                part.store(gl.where(kept[:, None], numbers, gl.zeros_like(numbers)))


@gluon.jit
def _produce(
    q, keys, ropes, values, q_buffer, k_buffer, v_buffer, q_full, k_full, k_empty, v_full, v_empty, v_tail,
    query, key_begin, num_keys, blocks, q_column, key_column, value_column,
):  # fmt: skip
    """The producer warp: copies the tile's queries, then the blocks of keys and values in order.

    Past the segment's keys lie another segment's, or old data. Such values get weight 0, but may be NaN or infinite,
    and 0 times that is NaN. So they are set to zero in the block in which the segment ends.
    """
    CHUNKS: gl.constexpr = q_buffer.shape[0] // 2
    NOPE_CHUNKS: gl.constexpr = CHUNKS - ropes.block_type.shape[1] // 64
    DEPTH: gl.constexpr = k_buffer.shape[0] // CHUNKS
    BLOCK_N: gl.constexpr = k_buffer.shape[1]
    mbarrier.expect(q_full, 2 * CHUNKS * q.block_type.nbytes)
    for half in gl.static_range(2):
        for chunk in gl.static_range(CHUNKS):
            place = [query + half * 64, q_column + chunk * 64]
            tma.async_copy_global_to_shared(q, place, q_full, q_buffer.index(half * CHUNKS + chunk))
    for block in range(blocks):
        stage = block % DEPTH
        parity = (block // DEPTH) & 1 ^ 1
        row = key_begin + block * BLOCK_N
        mbarrier.wait(k_empty.index(stage), parity)
        mbarrier.expect(k_full.index(stage), CHUNKS * keys.block_type.nbytes)
        for chunk in gl.static_range(NOPE_CHUNKS):
            target = k_buffer.index(stage * CHUNKS + chunk)
            tma.async_copy_global_to_shared(keys, [row, key_column + chunk * 64], k_full.index(stage), target)
        for chunk in gl.static_range(NOPE_CHUNKS, CHUNKS):
            target = k_buffer.index(stage * CHUNKS + chunk)
            tma.async_copy_global_to_shared(ropes, [row, (chunk - NOPE_CHUNKS) * 64], k_full.index(stage), target)
        mbarrier.wait(v_empty.index(stage), parity)
        target = v_buffer.index(stage)
        rest = num_keys - block * BLOCK_N
        if rest >= BLOCK_N:
            mbarrier.expect(v_full.index(stage), values.block_type.nbytes)
            tma.async_copy_global_to_shared(values, [row, value_column], v_full.index(stage), target)
        else:  # the last block
            mbarrier.expect(v_tail, values.block_type.nbytes)
            tma.async_copy_global_to_shared(values, [row, value_column], v_tail, target)
            mbarrier.wait(v_tail, 0)
            _clear(target, rest)
            fence_async_shared()
            _meet()
            mbarrier.arrive(v_full.index(stage), count=1)


@gluon.jit
def _issue_scores(q_buffer, k_buffer, k_full, block, half: gl.constexpr, layout: gl.constexpr):
    """Starts computing the scores [HALF, BLOCK_N] of a block."""
    CHUNKS: gl.constexpr = q_buffer.shape[0] // 2
    DEPTH: gl.constexpr = k_buffer.shape[0] // CHUNKS
    BLOCK_N: gl.constexpr = k_buffer.shape[1]
    stage = block % DEPTH
    mbarrier.wait(k_full.index(stage), block // DEPTH & 1)
    scores = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
    scores = warpgroup_mma(
        q_buffer.index(half * CHUNKS),
        k_buffer.index(stage * CHUNKS).permute([1, 0]),
        scores,
        use_acc=False,
        is_async=True,
    )
    for chunk in gl.static_range(1, CHUNKS):
        keys = k_buffer.index(stage * CHUNKS + chunk).permute([1, 0])
        scores = warpgroup_mma(q_buffer.index(half * CHUNKS + chunk), keys, scores, is_async=True)
    return scores


@gluon.jit
def _release(barriers, block, DEPTH: gl.constexpr):
    # One thread arrives for the warpgroup, but a warp knows only that its own products are done: so all meet first.
    _meet()
    mbarrier.arrive(barriers.index(block % DEPTH), count=1)


@gluon.jit
def _softmax(scores, top, total, visible, block, scale, MASKED: gl.constexpr):
    """One step of the online softmax: (running maximum of scores times log2(e), factor that rescales the sums so far,
    the block's weights, sum of weights)."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        BLOCK_N: gl.constexpr = scores.shape[1]
        key = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=columns)
        scores = gl.where(key[None, :] < visible[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
    shift = new_top
    if MASKED:
        # A query that has seen no key so far has the maximum -inf, and -inf - -inf would be NaN.
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = gl.exp2(top - shift)
    probability = gl.exp2(scores * scale - shift[:, None])
    return new_top, rescale, probability, total * rescale + gl.sum(probability, axis=1)


@gluon.jit
def _walk(
    begin, end, probability, top, total, sums, q_buffer, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty,
    visible, scale, half: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of blocks [begin, end), and sums of values of blocks [begin - 1, end - 1): those of block
    j - 1 are summed during the softmax of block j. `probability`: weights of block begin - 1; returns those of end - 1.

    No product is in flight when an iteration ends: else the assembler waits after every product.
    """
    DEPTH: gl.constexpr = v_buffer.shape[0]
    BLOCK_N: gl.constexpr = k_buffer.shape[1]
    value_layout: gl.constexpr = sums.type.layout
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    for block in range(begin, end):
        before = block - 1
        scores = _issue_scores(q_buffer, k_buffer, k_full, block, half, score_layout)
        mbarrier.wait(v_full.index(before % DEPTH), before // DEPTH & 1)
        sums = warpgroup_mma(probability, v_buffer.index(before % DEPTH), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _release(k_empty, block, DEPTH)
        top, rescale, weight, total = _softmax(scores, top, total, visible, block, scale, MASKED)
        sums = warpgroup_mma_wait(0, deps=[sums])
        _release(v_empty, before, DEPTH)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, value_layout))[:, None]
        probability = gl.convert_layout(weight.to(v_buffer.dtype), probability.type.layout)
    return probability, top, total, sums


@gluon.jit
def _finish(
    sums, top, total, out, lse, query, valid, out_stride, lse_stride,
    HAS_LSE: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """As prefill_kernel._finish. All arguments are in the layout of `sums`."""
    columns: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    VALUE: gl.constexpr = sums.shape[1]
    out += query.to(gl.int64)[:, None] * out_stride + gl.arange(0, VALUE, layout=columns)[None, :]
    lse += query.to(gl.int64) * lse_stride
    seen = total > 0
    divisor = gl.where(seen, total, 1.0)
    sums = sums / divisor[:, None]
    new = gl.where(seen, (top + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    if MERGE:
        old = gl.load(lse, valid, other=float("-inf"))
        high = gl.maximum(old, new)
        shift = gl.where(high == float("-inf"), 0.0, high)
        old_weight = gl.exp(old - shift)
        new_weight = gl.exp(new - shift)
        both = gl.where(high == float("-inf"), 1.0, old_weight + new_weight)
        before = gl.load(out, valid[:, None], other=0.0)
        sums = before * (old_weight / both)[:, None] + sums * (new_weight / both)[:, None]
        new = gl.log(both) + high
    gl.store(out, sums.to(out.dtype.element_ty), valid[:, None])
    if HAS_LSE:
        gl.store(lse, new, valid)


@gluon.jit
def _consume(
    q_buffer, k_buffer, v_buffer, q_full, k_full, k_empty, v_full, v_empty, position, out, lse,
    first, query_end, first_key, num_keys, blocks, scale, out_stride, lse_stride,
    half: gl.constexpr, HAS_LSE: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of the tile's queries against all of its blocks."""
    BLOCK_N: gl.constexpr = k_buffer.shape[1]
    VALUE: gl.constexpr = v_buffer.shape[2]
    DEPTH: gl.constexpr = v_buffer.shape[0]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=value_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    query = first + half * HALF + gl.arange(0, HALF, layout=row_layout)
    valid = query < query_end
    positions = gl.load(position + query, valid, other=first_key - 1)
    visible = gl.minimum(gl.maximum(positions - first_key + 1, 0), num_keys)
    # Positions ascend, so all queries see what the first one sees. If this half has none, the tile's last stands in.
    lowest = gl.load(position + min(first + half * HALF, query_end - 1)) - first_key + 1
    full = min(max(lowest, 0), num_keys) // BLOCK_N
    full = min(max(full, 1), blocks)  # the first block is always masked

    top = gl.full([HALF], float("-inf"), gl.float32, row_layout)
    total = gl.zeros([HALF], gl.float32, row_layout)
    sums = gl.zeros([HALF, VALUE], gl.float32, value_layout)
    mbarrier.wait(q_full, 0)
    scores = _issue_scores(q_buffer, k_buffer, k_full, 0, half, score_layout)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _release(k_empty, 0, DEPTH)
    top, rescale, weight, total = _softmax(scores, top, total, visible, 0, scale, True)
    probability = gl.convert_layout(weight.to(v_buffer.dtype), operand)
    probability, top, total, sums = _walk(
        1, full, probability, top, total, sums, q_buffer, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty,
        visible, scale, half, False,
    )  # fmt: skip
    probability, top, total, sums = _walk(
        full, blocks, probability, top, total, sums, q_buffer, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty,
        visible, scale, half, True,
    )  # fmt: skip
    last = blocks - 1
    mbarrier.wait(v_full.index(last % DEPTH), last // DEPTH & 1)
    sums = warpgroup_mma(probability, v_buffer.index(last % DEPTH), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    row_of_values: gl.constexpr = gl.SliceLayout(1, value_layout)
    query = gl.convert_layout(query, row_of_values)
    _finish(
        sums, gl.convert_layout(top, row_of_values), gl.convert_layout(total, row_of_values), out, lse,
        query, query < query_end, out_stride, lse_stride, HAS_LSE, MERGE,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tiles", "heads", "lse_stride"])
def _prefill_hopper_kernel(
    q, keys, ropes, values, position, segments, tiles, out, lse, num_tiles, heads, scale,
    q_head, key_head, value_head, out_stride, out_head, lse_stride, lse_head,
    NOPE: gl.constexpr, R: gl.constexpr, VD: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HAS_LSE: gl.constexpr, MERGE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = (NOPE + R) // 64
    place, head = _place(num_tiles, heads, GROUP)
    segment = gl.load(tiles + place * 2)
    if segment < 0:
        return
    first = gl.load(tiles + place * 2 + 1)
    query_end = gl.load(segments + segment * 5 + 1)
    key_begin = gl.load(segments + segment * 5 + 2)
    num_keys = gl.load(segments + segment * 5 + 3) - key_begin
    first_key = gl.load(segments + segment * 5 + 4)
    highest = gl.load(position + min(first + 2 * HALF, query_end) - 1) - first_key + 1
    seen = min(max(highest, 0), num_keys)
    if MERGE:
        if seen == 0:
            return
    blocks = max(gl.cdiv(seen, BLOCK_N), 1)  # if no key is seen, one block that is all masked

    dtype: gl.constexpr = q.dtype
    q_buffer = gl.allocate_shared_memory(dtype, [2 * CHUNKS, 64, 64], q.layout)
    k_buffer = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, BLOCK_N, 64], keys.layout)
    v_buffer = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, VD], values.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(v_tail, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    out += head.to(gl.int64) * out_head
    lse += head.to(gl.int64) * lse_head
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                q_buffer, k_buffer, v_buffer, q_full, k_full, k_empty, v_full, v_empty, position, out, lse,
                first, query_end, first_key, num_keys, blocks, scale, out_stride, lse_stride, zero, HAS_LSE, MERGE,
            )),
            (_consume, (
                q_buffer, k_buffer, v_buffer, q_full, k_full, k_empty, v_full, v_empty, position, out, lse,
                first, query_end, first_key, num_keys, blocks, scale, out_stride, lse_stride, one, HAS_LSE, MERGE,
            )),
            (_produce, (
                q, keys, ropes, values, q_buffer, k_buffer, v_buffer, q_full, k_full, k_empty, v_full, v_empty, v_tail,
                first, key_begin, num_keys, blocks, head * q_head, head * key_head, head * value_head,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def block_n(vd: int) -> int:
    """Keys of a block: as many as registers (sums and scores of a warpgroup's 64 queries) and shared memory allow."""
    return 128 if vd <= 128 else 64


def supports(q: torch.Tensor, rows: torch.Tensor, k_nope: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `prefill` below can do it: Hopper, 16-bit types, head dims that are whole chunks, aligned rows."""
    nope, vd = k_nope.shape[2], v.shape[2]
    rope = q.shape[2] - nope
    if not q.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(q.device)[0] != 9:
        return False
    fits = nope % CHUNK == 0 and rope % CHUNK == 0 and vd in (64, 128, 256) and q.shape[2] <= 256
    strides = [stride for t in (q, rows, k_nope, v) for stride in t.stride()[:-1]]
    starts = [t.data_ptr() for t in (q, rows[:, rows.shape[1] - rope :], k_nope, v)]
    aligned = all(stride % 8 == 0 for stride in strides) and all(start % 16 == 0 for start in starts)
    return fits and aligned and q.element_size() == 2 and all(t.stride(-1) == 1 for t in (q, rows, k_nope, v))


def _descriptor(tensor: torch.Tensor, num_rows: int, width: int) -> TensorDescriptor:
    """A descriptor of a tensor [C, ..., d] as a matrix of C rows, each of which holds all heads."""
    columns = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(tensor, [len(tensor), columns], [tensor.stride(0), 1], [num_rows, width], layout)


def prefill(
    q: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    merge: bool,
) -> None:
    """As prefill_kernel.prefill, for inputs that `supports` accepts."""
    heads, nope = k_nope.shape[1:]
    rope, vd = q.shape[2] - nope, v.shape[2]
    assert scale > 0 and out.stride(-1) == 1
    assert not merge or (lse is not None and out.dtype == torch.float32), "merging needs float32 results so far"
    if not len(tiles) or not heads or not len(q) or not len(v):
        return
    keys = block_n(vd)
    _prefill_hopper_kernel[(len(tiles) * heads,)](
        _descriptor(q, PREFILL_TILE // 2, CHUNK),
        _descriptor(k_nope, keys, CHUNK),
        _descriptor(rows[:, rows.shape[1] - rope :], keys, CHUNK),
        _descriptor(v, keys, vd),
        position, segments, tiles, out, out if lse is None else lse, len(tiles), heads, scale * LOG2_E,
        q.stride(1), k_nope.stride(1), v.stride(1), out.stride(0), out.stride(1),
        0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
        NOPE=nope, R=rope, VD=vd, BLOCK_N=keys, STAGES=STAGES, GROUP=HEAD_GROUP,
        HAS_LSE=lse is not None, MERGE=merge,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
