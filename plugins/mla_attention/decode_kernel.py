"""Absorbed (decode) attention over paged latent rows, in Triton, with contexts cut into parts (split-KV, cut.py).

A queries, H heads on this rank, L latent, R rope part, W = L + R; P pages of S rows. A program computes attention of
one query's heads, up to 64 of them, to one part of its context (Flash-Decoding; the online softmax of arXiv
2205.14135). It reads each tile of rows once and uses it twice: as keys, and its latent part as values. Both products
are computed transposed, with the rows along the tensor cores' long side and the heads along the short one, so that few
heads waste nothing. Where a context has several parts, a second kernel merges their results
(decode_merge_kernel.py).

Memory traffic: W numbers for each row and query. Arithmetic: 2 (W + L) operations for each row, query and head.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splash_plugins.mla_attention import decode_hopper_kernel
from splash_plugins.mla_attention.cut import BLOCK_HEADS, TILE_ROWS, Parts, extra_parts
from splash_plugins.mla_attention.decode_hopper_kernel import MOST_HEADS
from splash_plugins.mla_attention.decode_hopper_wide_kernel import NUM_WARPS, STAGES, WIDE_ROWS
from splash_plugins.mla_attention.decode_merge_kernel import merge
from splash_plugins.overlap_kernel import overlap, wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# From this number of queries on, tiles are chosen so that several programs share a multiprocessor (choose_config).
MANY_QUERIES = 32
# How many rows a program prefetches into the L2 cache while the kernel before it ends.
AHEAD = tl.constexpr(128)


@triton.jit
def _load_rows(rows, column, live, width: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `column` of the rows at pointers `rows` [n]; zeros for rows that are not live and past `width`."""
    pointers = rows[:, None] + column[None, :]
    if BLOCK == width:
        return tl.load(pointers, mask=live[:, None], other=0)
    return tl.load(pointers, mask=live[:, None] & (column[None, :] < width), other=0)


@triton.jit
def _page_of(table, tile, stride, last, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each row of the tile (of row `last` for rows past it), or a single one where pages hold whole
    tiles."""
    if S % BLOCK_N == 0:
        row = tl.minimum(tile * BLOCK_N, last)
    else:
        row = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), last)
    return tl.load(table + stride * (row // S), mask=row >= 0, other=0).to(tl.int64)


@triton.jit
def _fetch(pages, page_stride, row_stride, table, stride, begin, end, S: tl.constexpr, WIDTH: tl.constexpr):
    """Prefetches the first AHEAD of rows begin to end - 1 into the L2 cache. A row may still be written after that:
    writes go to the L2 too, so what is read there later is right."""
    size: tl.constexpr = pages.dtype.element_ty.primitive_bitwidth // 8
    lines: tl.constexpr = triton.next_power_of_2((WIDTH * size + 127) // 128)
    row = tl.minimum(begin + tl.arange(0, AHEAD), end - 1)
    page = tl.load(table + stride * (row // S)).to(tl.int64)
    column = tl.minimum(tl.arange(0, lines) * (128 // size), WIDTH - 1)
    at = (pages + page * page_stride + (row % S) * row_stride)[:, None] + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_parts(rows, live, width: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The first `width` columns of the rows, as PARTS blocks [n, BLOCK / PARTS]."""
    parts = ()
    for i in tl.static_range(PARTS):
        column = i * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)
        part = _load_rows(rows, column, live, width, BLOCK)
        parts = parts + (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def _attend(q_latent, q_rope, k_latent, k_rope, live, scale, top, total, sums, PARTS: tl.constexpr):
    """One step of the online softmax: returns (top, total, sums) with the rows of one tile added.

    top [BLOCK_H]: largest score so far, times log2(e); total [BLOCK_H]: sum of weights; sums: of weighted values, as
    PARTS blocks [BLOCK_L / PARTS, BLOCK_H]. Latent columns are in blocks because products of different blocks do not
    have to wait for one another.
    """
    factor = scale * LOG2_E
    scores = tl.dot(k_rope, q_rope, input_precision="ieee") * factor
    for i in tl.static_range(PARTS):
        scores += tl.dot(k_latent[i], q_latent[i], input_precision="ieee") * factor
    scores = tl.where(live[:, None], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    weight = tl.exp2(scores - new_top[None, :])
    fade = tl.exp2(top - new_top)
    new_sums = ()
    for i in tl.static_range(PARTS):
        faded = sums[i] * fade[None, :]
        faded = tl.dot(tl.trans(k_latent[i]), weight.to(k_rope.dtype), faded, input_precision="ieee")
        new_sums = new_sums + (faded,)  # type: ignore[assignment]
    return new_top, total * fade + tl.sum(weight, 0), new_sums


@triton.jit
def _write(sums, divisor, sum_lse, head, live, out, head_stride, lse, LATENT: tl.constexpr, BLOCK_L: tl.constexpr):
    """Writes the weighted sums, blocks [BLOCK_L / number of blocks, BLOCK_H], divided by divisor [BLOCK_H]; and
    sum_lse [BLOCK_H] to lse, if there is one."""
    PARTS: tl.constexpr = len(sums)
    for i in tl.static_range(PARTS):
        column = i * (BLOCK_L // PARTS) + tl.arange(0, BLOCK_L // PARTS)
        result = (sums[i] / divisor[None, :]).to(out.dtype.element_ty)
        to = out + head[None, :] * head_stride + column[:, None]
        tl.store(to, result, mask=live[None, :] & (column[:, None] < LATENT))
    if lse is not None:
        tl.store(lse + head, sum_lse, mask=live)


@triton.jit(do_not_specialize=["table_stride", "stride", "lse_stride"])
def decode_kernel(
    q, q_stride, q_head_stride,
    pages, page_stride, row_stride,
    tables, table_stride,
    slot, first, length, part, stride, scale,
    out, out_stride, out_head_stride,
    lse, lse_stride,
    partial, partial_lse,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, S: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr = 1, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """A program computes one of the parts `part` [n, 3] (cut.py; None: one for each query) for a block of heads. If it
    is its query's whole context and there is an `out`, the result goes to `out` and `lse` (which may be None); else to
    partial [n, HEADS, LATENT] and partial_lse [n, HEADS]."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    index = tl.program_id(0) // head_blocks
    # Before the wait only a step's index arrays may be loaded. The page is loaded early to hide its latency.
    read, begin = index, 0
    if part is not None:
        read = tl.load(part + 3 * index)
        begin = tl.load(part + 3 * index + 1)
    query = tl.maximum(read, 0).to(tl.int64)
    rows = tl.load(length + query)
    end = rows
    if part is not None:
        end = begin + tl.load(part + 3 * index + 2)
    table = tables + tl.load(slot + query).to(tl.int64) * table_stride + tl.load(first + query)
    page = _page_of(table, begin // BLOCK_N, stride, end - 1, S, BLOCK_N)
    if OVERLAP:
        if begin < end:
            _fetch(pages, page_stride, row_stride, table, stride, begin, end, S, LATENT + ROPE)
    wait_for_inputs(OVERLAP)
    if read < 0:
        return

    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    head_live = head < HEADS
    rope_column = tl.arange(0, BLOCK_R)
    head_rows = q + query * q_stride + head * q_head_stride
    q_rope = tl.trans(_load_rows(head_rows + LATENT, rope_column, head_live, ROPE, BLOCK_R))
    q_latent = ()
    sums = ()
    for i in tl.static_range(PARTS):
        column = i * (BLOCK_L // PARTS) + tl.arange(0, BLOCK_L // PARTS)
        block = tl.trans(_load_rows(head_rows, column, head_live, LATENT, BLOCK_L))
        q_latent = q_latent + (block,)  # type: ignore[assignment]
        zeros = tl.zeros([BLOCK_L // PARTS, BLOCK_H], tl.float32)
        sums = sums + (zeros,)  # type: ignore[assignment]

    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    in_tile = tl.arange(0, BLOCK_N)
    for n in range(begin // BLOCK_N, tl.cdiv(end, BLOCK_N)):
        row = n * BLOCK_N + in_tile
        live = row < end
        pointers = pages + page * page_stride + (row % S) * row_stride
        page = _page_of(table, n + 1, stride, end - 1, S, BLOCK_N)
        k_latent = _load_parts(pointers, live, LATENT, BLOCK_L, PARTS)
        k_rope = _load_rows(pointers + LATENT, rope_column, live, ROPE, BLOCK_R)
        top, total, sums = _attend(q_latent, q_rope, k_latent, k_rope, live, scale, top, total, sums, PARTS)

    divisor = tl.where(total > 0, total, 1)
    sum_lse = (top + tl.log2(divisor)) * LN_2
    if lse is not None:
        lse += query * lse_stride
    if part is not None:
        row = index.to(tl.int64) * HEADS
        partial += row * LATENT
        partial_lse += row
    if out is None:
        _write(sums, divisor, sum_lse, head, head_live, partial, LATENT, partial_lse, LATENT, BLOCK_L)
    elif part is None:
        _write(sums, divisor, sum_lse, head, head_live, out + query * out_stride, out_head_stride, lse, LATENT, BLOCK_L)
    else:
        if end - begin == rows:
            to = out + query * out_stride
            _write(sums, divisor, sum_lse, head, head_live, to, out_head_stride, lse, LATENT, BLOCK_L)
        else:
            _write(sums, divisor, sum_lse, head, head_live, partial, LATENT, partial_lse, LATENT, BLOCK_L)


@dataclass(frozen=True)
class DecodeConfig:
    """How much a program takes, and Triton's options."""

    block_h: int
    """Heads."""
    block_n: int
    """Rows of a tile."""
    num_warps: int
    num_stages: int
    parts: int = 1
    """Blocks that a row's latent columns are processed in (_attend)."""
    hopper: bool = False
    """Use the kernels written for Hopper (decode_hopper_kernel.py) instead of this one."""


def choose_config(
    heads: int, item_bytes: int, shared_bytes: int, is_hopper: bool, queries: int = MANY_QUERIES
) -> DecodeConfig:
    """The configuration of the portable kernel, for rows of 576 numbers. shared_bytes: the shared memory that a block
    of threads can get at most.

    Triton requests the tile after next only when a tile is done. So with fewer than three stages a program overlaps
    little of its copies with its arithmetic, unless several programs share a multiprocessor. Three stages of 64 rows do
    not fit into Hopper's shared memory. Few queries are still faster with 64 rows and two stages: the scores of 64 rows
    are left to the tensor cores alone, which few others use then.
    """
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    if item_bytes > 2:
        return DecodeConfig(16, 16, 4, 1)
    if is_hopper and block_h == 64:
        return DecodeConfig(64, 32, 8, 3)
    if is_hopper and queries < MANY_QUERIES:
        return DecodeConfig(block_h, 64, 4, 2)
    if is_hopper:
        return DecodeConfig(block_h, 32, 4, 3)
    return DecodeConfig(min(block_h, 32), 32, 4, 2 if shared_bytes >= 99 * 1024 else 1)


def hopper_config(stages: int, heads: int) -> DecodeConfig:
    """The configuration of Hopper's kernels. stages: of the kernel for up to MOST_HEADS heads."""
    if heads <= MOST_HEADS:
        return DecodeConfig(MOST_HEADS, TILE_ROWS, 4, stages, hopper=True)
    return DecodeConfig(BLOCK_HEADS, WIDE_ROWS, NUM_WARPS, STAGES, hopper=True)


def device_config(q: torch.Tensor, pages: torch.Tensor, latent: int) -> DecodeConfig:
    """The configuration for these queries and pages on the device that they lie on."""
    queries, heads, item = len(q), q.shape[1], q.element_size()
    if q.device.type != "cuda":
        return DecodeConfig(16, 32, 4, 1)
    if decode_hopper_kernel.supports(q, pages, latent):
        return hopper_config(decode_hopper_kernel.choose_stages(queries, heads), heads)
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(q.device)[0] == 9
    return choose_config(heads, item, device_shared_bytes(q), is_hopper, queries)


def device_shared_bytes(x: torch.Tensor) -> int:
    """The shared memory in bytes that a program can get at most on the device of x."""
    if not x.is_cuda:
        return 64 << 10
    return getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 64 << 10)


def decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    parts: Parts,
    stride: int,
    latent: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    config: DecodeConfig | None = None,
) -> None:
    """As plugins/mla_attention/decode_reference.py; the last axes are contiguous. bfloat16, float16 or float32.

    A query of length 0 may have any slot or none (-1). Allocates the parts' results (torch.empty).
    """
    if q.numel() == 0:  # also on ranks without heads
        return
    index = (pages, tables, slot, first, length, parts, stride, latent, scale)
    merge(*_attend_to_parts(q, *index, out, lse, config or device_config(q, pages, latent)), parts, out, lse)


def attention_parts(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    parts: Parts,
    stride: int,
    latent: int,
    scale: float,
    config: DecodeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to each of the parts, not merged: outputs [n, H, L] and log-sum-exps [n, H], both float32, undefined
    past the last part. For at most 64 queries."""
    index = (pages, tables, slot, first, length, parts, stride, latent, scale)
    return _attend_to_parts(q, *index, None, None, config)


def _attend_to_parts(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    parts: Parts,
    stride: int,
    latent: int,
    scale: float,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    config: DecodeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes all parts. With an out, contexts of one part go to out and lse, and only the others' parts into the
    returned (outputs, log-sum-exps); without, all parts do."""
    heads, width = q.shape[1:]
    room = min(len(parts.part), 2 * extra_parts(len(q)))
    assert out is not None or room == len(parts.part), "no room to keep the parts of so many queries"
    partial = torch.empty((room, heads, latent), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((room, heads), dtype=torch.float32, device=q.device)
    results = (out, lse, partial, partial_lse)
    if config.hopper:
        index = (tables, slot, first, length, stride, latent, scale)
        decode_hopper_kernel.launch(q, pages, *index, parts, *results, config.num_stages)
        return partial, partial_lse
    decode_kernel[(len(parts.part) * triton.cdiv(heads, config.block_h),)](
        q, q.stride(0), q.stride(1),
        pages, pages.stride(0), pages.stride(1),
        tables, tables.stride(0),
        slot, first, length, parts.part, stride, scale,
        out, *(out.stride()[:2] if out is not None else (0, 0)),
        lse, lse.stride(0) if lse is not None else 0,
        partial, partial_lse,
        HEADS=heads, LATENT=latent, ROPE=width - latent, S=pages.shape[1],
        BLOCK_H=config.block_h, BLOCK_N=config.block_n,
        BLOCK_L=max(16, triton.next_power_of_2(latent)), BLOCK_R=max(16, triton.next_power_of_2(width - latent)),
        PARTS=config.parts if latent >= 256 else 1,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlap(q),
    )  # fmt: skip
    return partial, partial_lse
