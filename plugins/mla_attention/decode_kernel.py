"""Absorbed (decode) attention over paged latent rows, in Triton, with the context split over programs.

A queries, H heads here, L latent, R rope part, W = L + R; P pages of S rows. A program takes one query, up to 64 heads
and a part of the context (Flash-Decoding; the online softmax of arXiv 2205.14135). It reads a tile of rows once, and
uses it twice: as keys, and its latent part as values. Both products are taken transposed, rows by heads: the rows fill
the tensor cores' long side, so that few heads waste nothing. Where a context has several parts, a second kernel merges
them.

Bytes to read: W numbers a row and query; operations: 2 (W + L) a row, query and head.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splash_plugins.mla_attention import decode_hopper_kernel
from splash_plugins.mla_attention.decode_hopper_kernel import MOST_HEADS, TILE_ROWS
from splash_plugins.mla_attention.decode_hopper_wide_kernel import BLOCK_HEADS, NUM_WARPS, STAGES, WIDE_ROWS
from splash_plugins.overlap_kernel import overlap, wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Parts of a context that the merge reads at a time, at most, and numbers of them all.
MERGE_BLOCK = 16
MERGE_NUMBERS = 2048
# Of one context; half of it where there are several.
MOST_PARTS = 64
# From so many queries on, several programs have to share a multiprocessor.
MANY_QUERIES = 32
# Rows that a program asks the L2 for while the kernel before it ends.
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
    """Pages of the tile's rows, none of them past `last`: one where a page holds whole tiles, else one a row."""
    if S % BLOCK_N == 0:
        row = tl.minimum(tile * BLOCK_N, last)
    else:
        row = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), last)
    return tl.load(table + stride * (row // S), mask=row >= 0, other=0).to(tl.int64)


@triton.jit
def _fetch(pages, page_stride, row_stride, table, stride, begin, end, S: tl.constexpr, WIDTH: tl.constexpr):
    """Has the first AHEAD of rows begin to end - 1 fetched into the L2. That they are written afterwards does no harm:
    writes take place there."""
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
    """Online softmax over one tile: `top`, `total` [BLOCK_H] and `sums`, PARTS times [BLOCK_L / PARTS, BLOCK_H], with
    its rows added. Products of parts of the columns do not wait for one another."""
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


@triton.jit(do_not_specialize=["table_stride", "stride", "splits", "least", "lse_stride", "lse_split_stride"])
def decode_kernel(
    q, q_stride, q_head_stride,
    pages, page_stride, row_stride,
    tables, table_stride,
    slot, first, length, stride, splits, least, scale,
    out, out_stride, out_split_stride, out_head_stride,
    lse, lse_stride, lse_split_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, S: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr = 1, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Contexts in up to `splits` parts of at least `least` tiles."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    query = (tl.program_id(0) // head_blocks).to(tl.int64)
    split = tl.program_id(1)
    # Loads that need nothing but the program's id come first, and the page before what its latency can hide.
    rows = tl.load(length + query)
    table = tables + tl.load(slot + query).to(tl.int64) * table_stride + tl.load(first + query)
    tiles = tl.cdiv(rows, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, splits), least)
    tile = split * share
    end = tl.minimum(tile + share, tiles)
    page = _page_of(table, tile, stride, rows - 1, S, BLOCK_N)
    if OVERLAP:
        if tile < end:
            last = tl.minimum(end * BLOCK_N, rows)
            _fetch(pages, page_stride, row_stride, table, stride, tile * BLOCK_N, last, S, LATENT + ROPE)
    wait_for_inputs(OVERLAP)
    if (splits > 1) & (tile >= end):
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
        part = tl.trans(_load_rows(head_rows, column, head_live, LATENT, BLOCK_L))
        q_latent = q_latent + (part,)  # type: ignore[assignment]
        zeros = tl.zeros([BLOCK_L // PARTS, BLOCK_H], tl.float32)
        sums = sums + (zeros,)  # type: ignore[assignment]

    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    in_tile = tl.arange(0, BLOCK_N)
    for n in range(tile, end):
        row = n * BLOCK_N + in_tile
        live = row < rows
        pointers = pages + page * page_stride + (row % S) * row_stride
        page = _page_of(table, n + 1, stride, rows - 1, S, BLOCK_N)
        k_latent = _load_parts(pointers, live, LATENT, BLOCK_L, PARTS)
        k_rope = _load_rows(pointers + LATENT, rope_column, live, ROPE, BLOCK_R)
        top, total, sums = _attend(q_latent, q_rope, k_latent, k_rope, live, scale, top, total, sums, PARTS)

    divisor = tl.where(total > 0, total, 1)
    to = out + query * out_stride + split * out_split_stride + head[None, :] * out_head_stride
    for i in tl.static_range(PARTS):
        column = i * (BLOCK_L // PARTS) + tl.arange(0, BLOCK_L // PARTS)
        result = (sums[i] / divisor[None, :]).to(out.dtype.element_ty)
        tl.store(to + column[:, None], result, mask=head_live[None, :] & (column[:, None] < LATENT))
    if lse is not None:
        sum_lse = (top + tl.log2(divisor)) * LN_2
        tl.store(lse + query * lse_stride + split * lse_split_stride + head, sum_lse, mask=head_live)


@triton.jit(do_not_specialize=["splits", "least"])
def merge_kernel(
    partial, partial_lse, length, splits, least,
    out, out_stride, out_head_stride,
    lse, lse_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """partial [A, splits, H, L] and partial_lse [A, splits, H] as decode_kernel wrote them, to out and lse."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    tiles = tl.cdiv(tl.load(length + query), BLOCK_N)
    written = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), least))
    first = query * splits * HEADS + head
    wait_for_inputs(OVERLAP)
    top = -float("inf")
    total = 0.0
    sums = tl.zeros([BLOCK_L], tl.float32)
    for begin in range(0, written, BLOCK_S):
        part = begin + tl.arange(0, BLOCK_S)
        live = part < written
        row = first + part * HEADS
        part_lse = tl.load(partial_lse + row, mask=live, other=-float("inf"))
        inside = live[:, None] & (column[None, :] < LATENT)
        values = tl.load(partial + row[:, None] * LATENT + column[None, :], mask=inside, other=0)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        weight = tl.exp(part_lse - new_top)
        fade = tl.exp(top - new_top)
        total = total * fade + tl.sum(weight, 0)
        sums = sums * fade + tl.sum(values * weight[:, None], 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1)
    result = sums / divisor
    to = out + query * out_stride + head * out_head_stride + column
    tl.store(to, result.to(out.dtype.element_ty), mask=column < LATENT)
    if lse is not None:
        if tl.program_id(2) == 0:
            tl.store(lse + query * lse_stride + head, top + tl.log(divisor))


@dataclass(frozen=True)
class DecodeConfig:
    """How a launch is cut: heads and rows a tile, Triton's options, and how many programs a multiprocessor can hold."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    parts: int = 1
    """Blocks that a row's latent columns are taken in."""
    hopper: bool = False
    """By Hopper's own kernels (decode_hopper_kernel.py)."""
    least_tiles: int = 1
    """Of a part of a context, where there are so many."""


def choose_config(
    heads: int, item_bytes: int, shared_bytes: int, is_hopper: bool, queries: int = MANY_QUERIES
) -> DecodeConfig:
    """For rows of 576 numbers; `shared_bytes` is what a block can get at most.

    Triton asks for the tile after next once a tile is done, so that less than three stages overlap little, and only
    several programs on one multiprocessor do. Three stages of 64 rows do not fit into Hopper's shared memory; still,
    few queries are faster so, since the scores of 64 rows are left to the tensor cores alone, which few others use.
    """
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    if item_bytes > 2:
        return DecodeConfig(16, 16, 4, 1, 2)
    if is_hopper and block_h == 64:
        return DecodeConfig(64, 32, 8, 3, 1)
    if is_hopper and queries < MANY_QUERIES:
        return DecodeConfig(block_h, 64, 4, 2, 1)
    if is_hopper:
        return DecodeConfig(block_h, 32, 4, 3, 2)
    return DecodeConfig(min(block_h, 32), 32, 4, 2 if shared_bytes >= 99 * 1024 else 1, 1)


def hopper_config(stages: int, heads: int, queries: int = 1) -> DecodeConfig:
    """Measured on an H200: the second tile of a part comes at next to no cost, as both are under way at once, and fewer
    parts are merged sooner, but for a query or two. With 16 a third tile pays too."""
    least = 1 if queries <= 2 else 2 if queries < 16 else 3
    if heads <= MOST_HEADS:
        return DecodeConfig(MOST_HEADS, TILE_ROWS, 4, stages, 3 - stages, hopper=True, least_tiles=least)
    least *= TILE_ROWS // WIDE_ROWS
    return DecodeConfig(BLOCK_HEADS, WIDE_ROWS, NUM_WARPS, STAGES, 1, hopper=True, least_tiles=least)


def device_config(q: torch.Tensor, pages: torch.Tensor, latent: int, likely: int | None = None) -> DecodeConfig:
    """likely: of the queries, about how many have a context; None: all."""
    queries = likely or len(q)
    heads, item = q.shape[1], q.element_size()
    if q.device.type != "cuda":
        return DecodeConfig(16, 32, 4, 1, 1)
    if decode_hopper_kernel.supports(q, pages, latent):
        return hopper_config(decode_hopper_kernel.choose_stages(queries, heads), heads, queries)
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(q.device)[0] == 9
    return choose_config(heads, item, device_shared_bytes(q), is_hopper, queries)


def device_shared_bytes(x: torch.Tensor) -> int:
    """Shared memory that a program can get where x lies."""
    if not x.is_cuda:
        return 64 << 10
    return getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 64 << 10)


def choose_splits(programs: int, most_tiles: int, config: DecodeConfig, num_sms: int) -> int:
    """Parts that each context is cut into, so that `programs` (queries times blocks of heads) fill the device once; no
    more than MOST_PARTS, since all have to be merged."""
    most = MOST_PARTS if programs == 1 else MOST_PARTS // 2
    return max(1, min(most_tiles, most, config.programs_per_sm * num_sms // programs))


def decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    stride: int,
    latent: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    likely: int | None = None,
    config: DecodeConfig | None = None,
    num_splits: int | None = None,
) -> None:
    """As plugins/mla_attention/decode_reference.py; the last axes are contiguous. bfloat16, float16 or float32.

    Queries of length 0 need no slot. Allocates the parts' results (torch.empty) where contexts are split.
    """
    if len(q) == 0:
        return
    likely = min(likely or len(q), len(q))  # a rank's own requests can be fewer than its share
    config = config or device_config(q, pages, latent, likely)
    num_splits = num_splits or splits_for(q, pages, tables, stride, config, likely)
    index = (pages, tables, slot, first, length, stride, latent, scale)
    if num_splits == 1:
        _launch(q, *index, out[:, None], lse[:, None] if lse is not None else None, config)
    else:
        _merge(*attention_parts(q, *index, config, num_splits), length, out, lse, config)


def splits_for(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    stride: int,
    config: DecodeConfig,
    likely: int | None = None,
) -> int:
    """likely: as in device_config."""
    programs = (likely or len(q)) * triton.cdiv(q.shape[1], config.block_h)
    most_tiles = triton.cdiv(triton.cdiv(tables.shape[1], stride) * pages.shape[1], config.block_n)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 8
    return choose_splits(programs, most_tiles, config, sms)


def attention_parts(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    stride: int,
    latent: int,
    scale: float,
    config: DecodeConfig,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to each of num_splits > 1 parts of the contexts, as merge_kernel takes it: outputs
    [A, splits, H, L] and log-sum-exp [A, splits, H], float32. What has no row is not written."""
    queries, heads, _ = q.shape
    part = torch.empty((queries, num_splits, heads, latent), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((queries, num_splits, heads), dtype=torch.float32, device=q.device)
    _launch(q, pages, tables, slot, first, length, stride, latent, scale, part, part_lse, config)
    return part, part_lse


def _launch(
    q: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slot: torch.Tensor,
    first: torch.Tensor,
    length: torch.Tensor,
    stride: int,
    latent: int,
    scale: float,
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    config: DecodeConfig,
) -> None:
    if config.hopper:
        index = (tables, slot, first, length, stride, latent, scale)
        decode_hopper_kernel.launch(q, pages, *index, part, part_lse, config.num_stages, config.least_tiles)
        return
    queries, heads, width = q.shape
    decode_kernel[(queries * triton.cdiv(heads, config.block_h), part.shape[1])](
        q, q.stride(0), q.stride(1),
        pages, pages.stride(0), pages.stride(1),
        tables, tables.stride(0),
        slot, first, length, stride, part.shape[1], config.least_tiles, scale,
        part, part.stride(0), part.stride(1), part.stride(2),
        part_lse, *(part_lse.stride()[:2] if part_lse is not None else (0, 0)),
        HEADS=heads, LATENT=latent, ROPE=width - latent, S=pages.shape[1],
        BLOCK_H=config.block_h, BLOCK_N=config.block_n,
        BLOCK_L=max(16, triton.next_power_of_2(latent)), BLOCK_R=max(16, triton.next_power_of_2(width - latent)),
        PARTS=config.parts if latent >= 256 else 1,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlap(q),
    )  # fmt: skip


def _merge(
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    length: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: DecodeConfig,
) -> None:
    queries, num_splits, heads, latent = part.shape
    at_once = min(MERGE_BLOCK, triton.next_power_of_2(num_splits))
    block = min(512, MERGE_NUMBERS // at_once, triton.next_power_of_2(latent))
    merge_kernel[(queries, heads, triton.cdiv(latent, block))](
        part, part_lse, length, num_splits, config.least_tiles,
        out, out.stride(0), out.stride(1),
        lse, lse.stride(0) if lse is not None else 0,
        HEADS=heads, LATENT=latent, BLOCK_N=config.block_n,
        BLOCK_S=at_once, BLOCK_L=block,
        num_warps=4, **overlap(out),
    )  # fmt: skip
