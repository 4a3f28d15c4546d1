"""Expanded (prefill) attention over one round of context, in Triton: keys and values are given, up-projected.

E queries on this rank, h heads, nope and R (rope) parts of the head dim, vd value dim, C rows of the round's buffer, S
segments, n tiles. Flash attention (Dao, arXiv:2307.08691): a program keeps a tile of queries of one head, or a part of
a tile, and loops over the keys that it sees. The rope part of a key is the same for all heads and is read from the
context rows.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from splash_plugins.mla_attention.tiles import PREFILL_TILE

HEAD_GROUP = 16  # heads that run at about the same time, few enough that their keys and values stay in the L2 cache
LOG2_E = 1.4426950408889634


@triton.jit
def _load(
    source, row, end, row_stride, column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + ROWS) and columns [column, column + WIDTH) of a matrix, padded to PADDED columns. Zeros from row
    `end` on; with TMA (source is a descriptor) only past the whole matrix."""
    if TMA:
        tile = source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = tl.arange(0, PADDED)
        mask = rows[:, None] < end
        if WIDTH < PADDED:
            mask = mask & (columns[None, :] < WIDTH)
        tile = tl.load(source + rows[:, None].to(tl.int64) * row_stride + (column + columns)[None, :], mask, other=0.0)
    return tile


@triton.jit
def _scores(
    q, q_tail, q_rope, keys, keys_tail, key_ropes, row, end, key_stride, rope_stride, column,
    BLOCK_N: tl.constexpr, NOPE: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr,
    ROPE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores [BLOCK_M, BLOCK_N] of one block of keys, float32, not scaled yet."""
    ropes = _load(key_ropes, row, end, rope_stride, 0, BLOCK_N, R, ROPE, TMA)
    scores = tl.dot(q_rope, ropes.T, input_precision=PRECISION)
    if TAIL > 0:
        tail = _load(keys_tail, row, end, key_stride, column + HEAD, BLOCK_N, NOPE - HEAD, TAIL, TMA)
        scores = tl.dot(q_tail, tail.T, scores, input_precision=PRECISION)
    head = _load(keys, row, end, key_stride, column, BLOCK_N, NOPE if TAIL == 0 else HEAD, HEAD, TMA)
    return tl.dot(q, head.T, scores, input_precision=PRECISION)


@triton.jit
def _accumulate(scores, top, total, acc, values, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax: (running maximum of scores times log2(e), sum of weights, sum of weighted values)
    with one block of keys added."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # A query that has seen no key so far has the maximum -inf, and -inf - -inf would be NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    rescale = tl.exp2(top - shift)
    probability = tl.exp2(scores * scale - shift[:, None])
    total = total * rescale + tl.sum(probability, 1)
    acc = tl.dot(probability.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _place(num_tiles, heads, GROUP: tl.constexpr):
    """(tile, head) of this program. Programs go through one group of heads after another; within a group, through all
    heads of a tile before the next tile."""
    program = tl.program_id(0)
    first = program // (num_tiles * GROUP) * GROUP
    size = min(heads - first, GROUP)
    place = program - num_tiles * first
    return place // size, first + place % size


@triton.jit
def _finish(
    acc, top, total, out, lse, query, valid, out_stride, lse_stride,
    VD: tl.constexpr, VALUE: tl.constexpr, HAS_LSE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Normalises and writes the result; with MERGE it is merged with the result so far, by their log-sum-exps."""
    out += query.to(tl.int64)[:, None] * out_stride + tl.arange(0, VALUE)[None, :]
    lse += query.to(tl.int64) * lse_stride
    mask = valid[:, None] & (tl.arange(0, VALUE) < VD)[None, :]
    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    new = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    if MERGE:
        old = tl.load(lse, valid, other=float("-inf"))
        high = tl.maximum(old, new)
        shift = tl.where(high == float("-inf"), 0.0, high)
        old_weight = tl.exp(old - shift)
        new_weight = tl.exp(new - shift)
        both = tl.where(high == float("-inf"), 1.0, old_weight + new_weight)
        before = tl.load(out, mask, other=0.0)
        acc = before * (old_weight / both)[:, None] + acc * (new_weight / both)[:, None]
        new = tl.log(both) + high
    tl.store(out, acc.to(out.dtype.element_ty), mask)
    if HAS_LSE:
        tl.store(lse, new, valid)


@triton.jit(do_not_specialize=["num_tiles", "heads", "lse_stride"])
def _prefill_kernel(
    q, position, keys, keys_tail, key_ropes, values, value_data, segments, tiles, out, lse,
    num_tiles, heads, scale, q_stride, q_head, key_stride, key_head, rope_stride, value_stride, value_head,
    out_stride, out_head, lse_stride, lse_head,
    NOPE: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr,
    VD: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, HAS_LSE: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = TILE // BLOCK_M
    place, head = _place(num_tiles * PARTS, heads, GROUP)
    segment = tl.load(tiles + place // PARTS * 2)
    if segment < 0:
        return
    first = tl.load(tiles + place // PARTS * 2 + 1) + place % PARTS * BLOCK_M
    query_end = tl.load(segments + segment * 5 + 1)
    if first >= query_end:
        return
    key_begin = tl.load(segments + segment * 5 + 2)
    key_end = tl.load(segments + segment * 5 + 3)
    first_key = tl.load(segments + segment * 5 + 4)
    query = first + tl.arange(0, BLOCK_M)
    valid = query < query_end
    positions = tl.load(position + query, valid, other=first_key - 1)
    # A query sees the rows from key_begin to its `visible`, exclusive.
    visible = key_begin + tl.minimum(tl.maximum(positions - first_key + 1, 0), key_end - key_begin)
    end = tl.max(visible, 0)
    if MERGE:
        if end == key_begin:
            return
    # Blocks of keys that every query sees whole need no mask.
    full = tl.min(tl.where(valid, visible, key_end), 0)
    full_end = key_begin + (full - key_begin) // BLOCK_N * BLOCK_N

    q += head.to(tl.int64) * q_head
    out += head.to(tl.int64) * out_head
    lse += head.to(tl.int64) * lse_head
    key_column = head * key_head
    value_column = head * value_head
    q_main = _load(q, first, query_end, q_stride, 0, BLOCK_M, NOPE if TAIL == 0 else HEAD, HEAD, False)
    q_tail = q_main
    if TAIL > 0:
        q_tail = _load(q, first, query_end, q_stride, HEAD, BLOCK_M, NOPE - HEAD, TAIL, False)
    q_rope = _load(q, first, query_end, q_stride, NOPE, BLOCK_M, R, ROPE, False)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    for row in tl.range(key_begin, full_end, BLOCK_N):
        scores = _scores(
            q_main, q_tail, q_rope, keys, keys_tail, key_ropes, row, end, key_stride, rope_stride, key_column,
            BLOCK_N, NOPE, HEAD, TAIL, R, ROPE, TMA, PRECISION,
        )  # fmt: skip
        v = _load(values, row, end, value_stride, value_column, BLOCK_N, VD, VALUE, TMA)
        top, total, acc = _accumulate(scores, top, total, acc, v, scale, False, PRECISION)
    for row in tl.range(full_end, end, BLOCK_N):
        scores = _scores(
            q_main, q_tail, q_rope, keys, keys_tail, key_ropes, row, end, key_stride, rope_stride, key_column,
            BLOCK_N, NOPE, HEAD, TAIL, R, ROPE, TMA, PRECISION,
        )  # fmt: skip
        # Past `end` may lie anything, also NaN, which stays NaN times a weight of 0. So values are loaded here with a
        # mask, which a descriptor cannot do.
        v = _load(value_data, row, end, value_stride, value_column, BLOCK_N, VD, VALUE, False)
        scores = tl.where((row + tl.arange(0, BLOCK_N))[None, :] < visible[:, None], scores, float("-inf"))
        top, total, acc = _accumulate(scores, top, total, acc, v, scale, True, PRECISION)
    _finish(acc, top, total, out, lse, query, valid, out_stride, lse_stride, VD, VALUE, HAS_LSE, MERGE)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a launch cuts its work."""

    block_m: int
    """Queries of a program."""
    block_n: int
    """Keys of a block."""
    warps: int
    stages: int
    tma: bool = False
    """Load keys and values through tensor descriptors: from compute capability 9.0 on, for 16-bit types and parts of
    the head dim that need no padding."""

    def shared_bytes(self, depth: int, value: int, itemsize: int) -> int:
        """About how much shared memory a program needs: for queries, and for keys and values in every stage."""
        keys = self.block_n * (depth + value) * itemsize
        return self.block_m * depth * itemsize + keys * self.stages + 4096


def split_nope(nope: int) -> tuple[int, int]:
    """(head, tail): two powers of two, 16 or more, that together hold nope columns with less padding than one would;
    tail is 0 where one does as well."""
    whole = max(16, triton.next_power_of_2(nope))
    head = whole // 2
    if head < 16 or nope <= head:
        return whole, 0
    tail = max(16, triton.next_power_of_2(nope - head))
    return (head, tail) if head + tail < whole else (whole, 0)


def pad(dim: int) -> int:
    """The power of two, 16 or more, that dim columns are padded to."""
    return max(16, triton.next_power_of_2(dim))


def choose_blocks(nope: int, rope: int, vd: int, itemsize: int, shared_bytes: int, tma: bool) -> Blocks:
    """The largest blocks that fit into the shared memory of a block of threads (and into registers, on Hopper)."""
    depth, value = sum(split_nope(nope)) + pad(rope), pad(vd)
    tries = [
        Blocks(block_m=128, block_n=64, warps=8, stages=3),
        Blocks(block_m=128, block_n=64, warps=8, stages=2),
        Blocks(block_m=64, block_n=64, warps=4, stages=2),
        Blocks(block_m=64, block_n=32, warps=4, stages=2),
        Blocks(block_m=64, block_n=32, warps=4, stages=1),
        Blocks(block_m=32, block_n=16, warps=8, stages=1),
        Blocks(block_m=16, block_n=16, warps=4, stages=1),
    ]
    if itemsize > 2:
        tries = tries[-2:]  # float32 products are unrolled, not on tensor cores: larger ones take minutes to compile
    for blocks in tries:
        if blocks.shared_bytes(depth, value, itemsize) <= shared_bytes:
            return replace(blocks, tma=tma)
    raise ValueError(
        f"head dims nope {nope}, rope {rope}, v {vd} need more than the {shared_bytes} bytes of shared memory that a "
        "block has on this GPU; use a GPU with more, or a 16-bit dtype"
    )


@cache
def _device_limits(index: int) -> tuple[int, bool]:
    """(the most shared memory of a block of threads in bytes, whether the GPU has tensor descriptors)."""
    properties = torch.cuda.get_device_properties(index)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 64 * 1024))
    return shared, torch.version.hip is None and properties.major >= 9


def _tma_fits(nope: int, rope: int, vd: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensor descriptors can load these tensors: no padding, 16-bit types, 16-byte alignment."""
    exact = sum(split_nope(nope)) == nope and pad(rope) == rope and pad(vd) == vd
    return exact and all(
        t.element_size() == 2 and t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 and len(t) > 0
        for t in tensors
    )


def _descriptor(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of a tensor [C, ..., d] as a matrix of C rows, each of which may hold all heads."""
    columns = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return TensorDescriptor(tensor, [len(tensor), columns], [tensor.stride(0), 1], [rows, width])


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
    blocks: Blocks | None = None,
) -> None:
    """Attention of this round's queries to its keys, written to out and lse, or merged into them.

    q [E, h, nope + R], rotated; position [E] int32; rows [C, W], whose last R columns are the keys' rotated rope part;
    k_nope [C, h, nope]; v [C, h, vd]; scale > 0.
    segments [S, 5] int32 (query_begin, query_end, key_begin, key_end, first_key): rows key_begin … key_end - 1 hold
    the keys at positions first_key, first_key + 1, …, and queries [query_begin, query_end) see those of them that are
    not beyond their own position. tiles [n, 2] int32: from tiles_of (tiles.py), padded with segment NO_TILE.
    out [E, h, vd]; lse [E, h] float32, natural logarithm.
    merge=False writes out and lse; a query that sees nothing gets 0 and -inf. merge=True: out (float32) and lse hold
    the result over other keys, and this one is merged with it by log-sum-exp. Queries in no tile are left alone.
    Rows of rows, k_nope and v that are no keys of a segment do not matter to it, even if they are NaN or infinite.
    All tensors may be slices of others; q, rows, k_nope, v and out are dense in their last dim.
    """
    heads, nope = k_nope.shape[1:]
    rope, vd = q.shape[2] - nope, v.shape[2]
    assert scale > 0 and out.stride(-1) == 1 and q.stride(-1) == 1 and v.stride(-1) == 1
    assert not merge or (lse is not None and out.dtype == torch.float32), "merging needs float32 results so far"
    if not len(tiles) or not heads:
        return
    ropes = rows[:, rows.shape[1] - rope :]
    if blocks is None:
        shared, has_tma = _device_limits(q.device.index or 0) if q.is_cuda else (1 << 20, False)
        has_tma = has_tma and _tma_fits(nope, rope, vd, (ropes, k_nope, v))
        blocks = choose_blocks(nope, rope, vd, q.element_size(), shared, has_tma)
    head, tail = split_nope(nope)
    sources: list[torch.Tensor | TensorDescriptor] = [k_nope, k_nope, ropes, v]
    if blocks.tma:
        widths = (head, tail or head, rope, vd)
        sources = [
            _descriptor(t, blocks.block_n, width) for t, width in zip((k_nope, k_nope, ropes, v), widths, strict=True)
        ]
    parts = PREFILL_TILE // blocks.block_m
    _prefill_kernel[(len(tiles) * parts * heads,)](
        q, position, *sources, v, segments, tiles, out, out if lse is None else lse,
        len(tiles), heads, scale * LOG2_E, q.stride(0), q.stride(1), k_nope.stride(0), k_nope.stride(1),
        rows.stride(0), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
        NOPE=nope, HEAD=head, TAIL=tail, R=rope, ROPE=pad(rope), VD=vd, VALUE=pad(vd), TILE=PREFILL_TILE,
        BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n, GROUP=HEAD_GROUP, TMA=blocks.tma,
        HAS_LSE=lse is not None, MERGE=merge, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
