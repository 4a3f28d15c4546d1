"""Absorbed (decode) attention for Hopper, in Gluon: as decode_kernel, but with copies always in flight.

A program (a block of threads) computes one query's heads, up to 32, for a part of its context, in tiles of 64 rows. The
tensor memory accelerator (TMA) copies a tile into shared memory, where both products read it: the scores, rows by
heads, then the weighted sums of values, latent columns by heads. So rows or columns are on the tensor cores' long side
and heads on the short one. One warpgroup does everything: its products take less time than its copies, and requesting a
copy takes next to none. While it computes, the next tile is copied; where there is shared memory for one tile only, the
tile of the other program on the multiprocessor is.

A tile's rope columns are needed for its scores only, so the softmax weights are stored in their place.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
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

from splash_plugins.mla_attention.cut import BLOCK_HEADS, MOST_SHARED_HEADS, TILE_ROWS, Parts, shares_sm
from splash_plugins.mla_attention.decode_hopper_wide_kernel import NUM_WARPS, WIDE_ROWS, decode_hopper_wide_kernel
from splash_plugins.mla_attention.decode_parts_kernel import ROPE, clear, fetch, find, meet, seek, take
from splash_plugins.overlap_kernel import overlap, wait_for_inputs

MOST_HEADS = MOST_SHARED_HEADS
_ROWS = gl.constexpr(TILE_ROWS)
_ROPE = gl.constexpr(ROPE)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _copy(latent_rows, rope_rows, latents, ropes, latent_full, rope_full, index, place):
    """Requests the copy of this program's tile number `index`: its latent columns and its rope columns."""
    LATENT: gl.constexpr = latents.shape[3]
    stage = index % latents.shape[0]
    full = latent_full.index(stage)
    mbarrier.expect(full, latent_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(latent_rows, [place[0], place[1], 0], full, latents.index(stage))
    full = rope_full.index(stage)
    mbarrier.expect(full, rope_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(rope_rows, [place[0], place[1], LATENT], full, ropes.index(stage))


@gluon.jit
def _load_queries(q, head_stride, q_latent, q_rope, HEADS: gl.constexpr):
    """Loads one query's heads into shared memory; zeros past HEADS."""
    BLOCK_H: gl.constexpr = q_latent.shape[0]
    LATENT: gl.constexpr = q_latent.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))[:, None]
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, wide))[None, :]
    latent = gl.load(q + head * head_stride + column, head < HEADS, other=0)
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))[:, None]
    column = gl.arange(0, _ROPE, layout=gl.SliceLayout(0, narrow))[None, :]
    rope = gl.load(q + head * head_stride + LATENT + column, head < HEADS, other=0)
    q_latent.store(latent)
    q_rope.store(rope)
    fence_async_shared()
    meet()


@gluon.jit
def _issue_scores(q_latent, q_rope, latents, ropes, latent_full, rope_full, index, live):
    """Starts computing the scores [64, BLOCK_H] of this program's tile number `index`, of whose rows the first `live`
    belong to the part.

    The other rows may be NaN or infinite. As values they would be weighted with 0, and 0 times that is NaN. So they are
    set to zero, while the scores are computed: theirs are masked anyway.
    """
    BLOCK_H: gl.constexpr = q_latent.shape[0]
    LATENT: gl.constexpr = q_latent.shape[1]
    STAGES: gl.constexpr = latents.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    stage = index % STAGES
    phase = index // STAGES & 1
    latent = latents.index(stage).reshape([_ROWS, LATENT])
    rope = ropes.index(stage).reshape([_ROWS, _ROPE])
    scores = gl.zeros([_ROWS, BLOCK_H], gl.float32, layout)
    mbarrier.wait(latent_full.index(stage), phase)
    scores = warpgroup_mma(latent, q_latent.permute([1, 0]), scores, use_acc=False, is_async=True)
    mbarrier.wait(rope_full.index(stage), phase)
    scores = warpgroup_mma(rope, q_rope.permute([1, 0]), scores, is_async=True)
    if live < _ROWS:
        clear(latent, live)
    return scores


@gluon.jit
def _softmax(scores, top, total, sums, live, factor):
    """Online softmax over the tile's rows: (largest score so far [BLOCK_H], times log2(e); sum of weights, kept by row
    of a tile, [64, BLOCK_H]; sums, rescaled; the tile's weights)."""
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, scores.type.layout))
    scores = gl.where((row < live)[:, None], scores * factor, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=0))
    weight = gl.exp2(scores - new_top[None, :])
    fade = gl.exp2(top - new_top)
    return new_top, total * fade[None, :] + weight, sums * fade[None, :], weight


@gluon.jit
def _issue_values(weight, sums, latents, ropes, index):
    """Starts adding the tile's weighted values to `sums` [LATENT, BLOCK_H]. The weights are stored over its rope
    columns, which no warp needs any more: the softmax's maximum took the scores of all warps."""
    BLOCK_H: gl.constexpr = sums.shape[1]
    LATENT: gl.constexpr = sums.shape[0]
    weights = ropes.index(index % ropes.shape[0]).reshape([_ROWS, _ROPE]).slice(0, BLOCK_H)
    weights.store(weight.to(ropes.dtype).permute([1, 0]))
    fence_async_shared()
    meet()
    values = latents.index(index % latents.shape[0]).reshape([_ROWS, LATENT]).permute([1, 0])
    return warpgroup_mma(values, weights.permute([1, 0]), sums, is_async=True)


@gluon.jit
def _walk(
    q_latent, q_rope, latent_rows, rope_rows, latents, ropes, latent_full, rope_full,
    table, stride, begin, count, live, factor, S: gl.constexpr,
):  # fmt: skip
    """Goes through this program's tiles: (largest scores [BLOCK_H], total [64, BLOCK_H], sums [LATENT, BLOCK_H])."""
    BLOCK_H: gl.constexpr = q_latent.shape[0]
    LATENT: gl.constexpr = q_latent.shape[1]
    STAGES: gl.constexpr = latents.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([_ROWS, BLOCK_H], gl.float32, layout)
    sums = gl.zeros([LATENT, BLOCK_H], gl.float32, layout)
    for index in range(count):
        place = find(table, stride, begin + index + STAGES, index + STAGES < count, S, _ROWS)
        scores = _issue_scores(q_latent, q_rope, latents, ropes, latent_full, rope_full, index, live)
        scores = warpgroup_mma_wait(0, deps=[scores])
        top, total, sums, weight = _softmax(scores, top, total, sums, live, factor)
        sums = _issue_values(weight, sums, latents, ropes, index)
        sums = warpgroup_mma_wait(0, deps=[sums])
        meet()  # all warps are done with this tile: its place may be overwritten
        if index + STAGES < count:
            _copy(latent_rows, rope_rows, latents, ropes, latent_full, rope_full, index + STAGES, place)
        live -= _ROWS
    return top, total, sums


@gluon.jit
def _normalised(top, total, sums):
    """(sums [LATENT, BLOCK_H] divided by the sum of weights, log-sum-exp [BLOCK_H])."""
    whole = gl.sum(total, axis=0)
    divisor = gl.where(whole > 0, whole, 1.0)
    return sums / divisor[None, :], (top + gl.log2(divisor)) * _LN_2


@gluon.jit
def _write(sums, sum_lse, out, head_stride, lse, HEADS: gl.constexpr):
    layout: gl.constexpr = sums.type.layout
    LATENT: gl.constexpr = sums.shape[0]
    BLOCK_H: gl.constexpr = sums.shape[1]
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, layout))
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(1, layout))
    to = out + head[None, :] * head_stride + column[:, None]
    gl.store(to, sums.to(out.dtype.element_ty), (head < HEADS)[None, :])
    if lse is not None:
        gl.store(lse + head, sum_lse, head < HEADS)


@gluon.jit(do_not_specialize=["table_stride", "stride", "lse_stride"])
def decode_hopper_kernel(
    q, q_stride, q_head_stride,
    latent_rows, rope_rows, pages, page_stride, row_stride,
    tables, table_stride,
    slot, first, length, part, stride, scale,
    out, out_stride, out_head_stride,
    lse, lse_stride,
    partial, partial_lse,
    HEADS: gl.constexpr, LATENT: gl.constexpr, S: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """A program computes one of the parts `part` [n, 3] (cut.py). If it is its query's whole context and there is an
    `out`, the result goes to `out` and `lse` (which may be None); else to partial [n, HEADS, LATENT] and partial_lse
    [n, HEADS]. `latent_rows` and `rope_rows` are descriptors of `pages` [P, S, W], by blocks of 64 rows and LATENT or
    64 columns."""
    index = gl.program_id(0)
    read, query, whole, table, first_row, rows = take(part, index, slot, first, length, tables, table_stride)
    if read < 0:
        wait_for_inputs(OVERLAP)  # every program has to wait (overlap_kernel.py)
        return
    begin = first_row // _ROWS
    count = gl.cdiv(rows, _ROWS)
    places = seek(table, stride, begin, count, S, _ROWS, STAGES)

    dtype: gl.constexpr = q.dtype.element_ty
    matrix: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latents = gl.allocate_shared_memory(dtype, [STAGES, 1, _ROWS, LATENT], latent_rows.layout)
    ropes = gl.allocate_shared_memory(dtype, [STAGES, 1, _ROWS, _ROPE], rope_rows.layout)
    q_latent = gl.allocate_shared_memory(dtype, [BLOCK_H, LATENT], matrix)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, _ROPE], matrix)
    latent_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rope_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(latent_full.index(stage), count=1)
        mbarrier.init(rope_full.index(stage), count=1)
    fence_async_shared()
    meet()

    if OVERLAP:
        end = first_row + rows
        fetch(pages, page_stride, row_stride, table, stride, begin, count, end, S, LATENT + _ROPE, STAGES, _ROWS)
    wait_for_inputs(OVERLAP)
    for i in gl.static_range(STAGES):
        if i < count:
            _copy(latent_rows, rope_rows, latents, ropes, latent_full, rope_full, i, places[i])
    _load_queries(q + query * q_stride, q_head_stride, q_latent, q_rope, HEADS)

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
        _write(sums, sum_lse, partial, LATENT, partial_lse, HEADS)
    else:
        if whole:
            _write(sums, sum_lse, out + query * out_stride, out_head_stride, lse, HEADS)
        else:
            _write(sums, sum_lse, partial, LATENT, partial_lse, HEADS)


def supports(q: torch.Tensor, pages: torch.Tensor, latent: int) -> bool:
    """Whether `launch` below can do it: Hopper, 16-bit types, pages of whole tiles, aligned rows; with more than
    MOST_HEADS heads also aligned queries and at least 128 latent columns."""
    if not q.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    if q.element_size() != 2 or not q.is_floating_point():
        return False
    whole = latent in (64, 128, 256, 512) and q.shape[2] - latent == ROPE and pages.shape[1] % TILE_ROWS == 0
    if q.shape[1] > MOST_HEADS and (latent < 128 or not _is_aligned(q)):
        return False
    return whole and len(pages) > 0 and _is_aligned(pages)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor, of 16-bit numbers."""
    strides = tensor.stride()
    return tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides[:-1]) and strides[-1] == 1


def choose_stages(queries: int, heads: int) -> int:
    """How many tiles a program's shared memory holds, as measured on an H200. With 1, two programs of up to 32 heads
    can share a multiprocessor; with 2, a program copies while it computes. A third gains nothing."""
    return 1 if shares_sm(queries, heads) else 2


def _descriptor(tensor: torch.Tensor, num_rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of pages [P, S, W] or queries [A, H, W], by blocks of num_rows rows (or heads) and `columns`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, num_rows, columns], layout)


def launch(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    stride: int,
    latent: int,
    scale: float,
    parts: Parts,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    stages: int,
) -> None:
    """Computes attention to all parts, in tiles of TILE_ROWS rows, or of WIDE_ROWS rows for more than MOST_HEADS heads.
    Arguments as in decode_kernel.py's _attend_to_parts; inputs as `supports` says. stages: 1 or 2; without effect for
    more than MOST_HEADS heads."""
    heads, num_parts = q.shape[1], len(parts.part)
    rest = (
        pages, pages.stride(0), pages.stride(1),
        tables, tables.stride(0),
        slot, first, length, parts.part, stride, scale,
        out, *(out.stride()[:2] if out is not None else (0, 0)),
        lse, lse.stride(0) if lse is not None else 0,
        partial, partial_lse,
    )  # fmt: skip
    if heads <= MOST_HEADS:
        decode_hopper_kernel[(num_parts,)](
            q, q.stride(0), q.stride(1),
            _descriptor(pages, TILE_ROWS, latent), _descriptor(pages, TILE_ROWS, ROPE), *rest,
            HEADS=heads, LATENT=latent, S=pages.shape[1], BLOCK_H=16 if heads <= 16 else MOST_HEADS, STAGES=stages,
            num_warps=4, **overlap(q),
        )  # fmt: skip
    else:
        decode_hopper_wide_kernel[(num_parts * triton.cdiv(heads, BLOCK_HEADS),)](
            _descriptor(q, BLOCK_HEADS, latent // 2), _descriptor(q, BLOCK_HEADS, ROPE),
            _descriptor(pages, WIDE_ROWS, latent // 2), _descriptor(pages, WIDE_ROWS, ROPE), *rest,
            HEADS=heads, LATENT=latent, S=pages.shape[1],
            num_warps=NUM_WARPS, **overlap(q),
        )  # fmt: skip
