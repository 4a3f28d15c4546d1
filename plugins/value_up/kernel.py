"""Triton: computes values from attention's latent outputs, for few queries; another kernel does so from the results for
parts of contexts, which it merges on the way.

A queries, H heads, L KV latent, v a head's values. A program takes one head, some queries and a tile of values; it
loads its weights before attention is done. The time is that of reading H v L weights and, from the L2 cache, the parts'
results: each of the v / BLOCK_V programs of a head reads all of that head's, so that more than a few are better merged
before.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from splash_plugins.mla_attention.cut import Parts
from splash_plugins.mla_attention.decode_kernel import (
    DecodeConfig,
    attention_parts,
    decode,
    device_config,
    device_shared_bytes,
)
from splash_plugins.overlap_kernel import overlap, wait_for_inputs

MOST_QUERIES = 32
BLOCK_V = 32
# With more queries than this, parts are merged in a launch of their own, which has more programs.
MOST_FUSED = 16
# Of a program that merges: its columns of values, and the parts, over all its queries, that it reads at a time.
MERGE_BLOCK_V = 128
PARTS = 32


@triton.jit
def _weights(w_uv, head, column, latent, VALUE: tl.constexpr, LATENT: tl.constexpr):
    """A head's weights for some columns of values, [BLOCK_V, BLOCK_L]."""
    inside = (column < VALUE)[:, None] & (latent < LATENT)[None, :]
    return tl.load(w_uv + (head * VALUE + column[:, None]) * LATENT + latent[None, :], mask=inside, other=0)


@triton.jit(do_not_specialize=["queries"])
def value_up_kernel(
    latents, latents_stride, latents_head_stride, w_uv, out, out_stride, out_head_stride, queries,
    LATENT: tl.constexpr, VALUE: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    a = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    latent = tl.arange(0, BLOCK_L)
    w = _weights(w_uv, head, column, latent, VALUE, LATENT)
    wait_for_inputs(OVERLAP)
    rows = latents + a[:, None] * latents_stride + head * latents_head_stride
    x = tl.load(rows + latent[None, :], mask=(a < queries)[:, None] & (latent < LATENT)[None, :], other=0)
    result = tl.dot(x, tl.trans(w), input_precision="ieee")
    to = out + a[:, None] * out_stride + head * out_head_stride + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=(a < queries)[:, None] & (column < VALUE)[None, :])


@triton.jit(do_not_specialize=["queries"])
def merge_up_kernel(
    partial, partial_lse, read_part, w_uv, out, out_stride, out_head_stride, queries, first_head,
    HEADS: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merges the parts' results partial [n, HEADS, L] and partial_lse [n, HEADS], as decode_kernel wrote them, and
    multiplies them with w_uv, into out. read_part [A, 2] says which parts are a query's; w_uv is for the heads from
    first_head on."""
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    latent = tl.arange(0, BLOCK_L)
    w = _weights(w_uv, head, column, latent, VALUE, LATENT)
    a = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    first = tl.load(read_part + 2 * a, mask=a < queries, other=0)
    count = tl.load(read_part + 2 * a + 1, mask=a < queries, other=0)
    wait_for_inputs(OVERLAP)
    top = tl.full((BLOCK_A,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_A,), tl.float32)
    sums = tl.zeros((BLOCK_A, BLOCK_L), tl.float32)
    for begin in range(0, tl.max(count, 0), BLOCK_S):
        part = begin + tl.arange(0, BLOCK_S)
        there = part[None, :] < count[:, None]
        row = (first[:, None] + part[None, :]).to(tl.int64) * HEADS + first_head + head
        lse = tl.load(partial_lse + row, mask=there, other=-float("inf"))
        inside = there[:, :, None] & (latent < LATENT)[None, None, :]
        values = tl.load(partial + row[:, :, None] * LATENT + latent[None, None, :], mask=inside, other=0)
        top, before = tl.maximum(top, tl.max(lse, 1)), top
        base = tl.where(top > -float("inf"), top, 0)  # -inf for queries that see no row
        fade = tl.exp(before - base)
        weight = tl.exp(lse - base[:, None])
        total = total * fade + tl.sum(weight, 1)
        sums = sums * fade[:, None] + tl.sum(values * weight[:, :, None], 1)
    merged = (sums / tl.where(total > 0, total, 1)[:, None]).to(w.dtype)
    result = tl.dot(merged, tl.trans(w), input_precision="ieee")
    to = out + a[:, None] * out_stride + head * out_head_stride + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=(a < queries)[:, None] & (column < VALUE)[None, :])


def value_up(latents: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor) -> None:
    """As plugins/value_up/reference.py; w_uv is contiguous, latents and out in their last axes."""
    queries, heads, num_latent = latents.shape
    value = w_uv.shape[1]
    if queries == 0:
        return
    if queries > MOST_QUERIES or num_latent > 512:
        torch.bmm(latents.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))
        return
    block_a = max(16, triton.next_power_of_2(queries))
    value_up_kernel[(triton.cdiv(value, BLOCK_V), heads, triton.cdiv(queries, block_a))](
        latents, latents.stride(0), latents.stride(1), w_uv, out, out.stride(0), out.stride(1), queries,
        LATENT=num_latent, VALUE=value, BLOCK_A=block_a, BLOCK_L=max(16, triton.next_power_of_2(num_latent)),
        BLOCK_V=BLOCK_V, num_warps=4 if block_a < 64 else 8, **overlap(latents),
    )  # fmt: skip


def merge_columns(row_bytes: int, shared_bytes: int) -> int:
    """How many columns of values, each with row_bytes of weights, a program of merge_up takes. With fewer, the same
    parts are merged more often; but weights pass through shared memory, of which a program can get shared_bytes."""
    return MERGE_BLOCK_V if MERGE_BLOCK_V * row_bytes <= 3 * shared_bytes // 4 else BLOCK_V


def merge_up(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    read_part: torch.Tensor,
    w_uv: torch.Tensor,
    first_head: int,
    out: torch.Tensor,
    *,
    block_v: int | None = None,
    parts: int = PARTS,
) -> None:
    """Merges the results of decode_kernel.attention_parts, partial [n, H, L] and partial_lse [n, H], for the heads from
    first_head on, and multiplies them with w_uv [h, v, L], into out [A, h, v]. read_part [A, 2] says which parts are a
    query's (cut.py)."""
    queries, (all_heads, num_latent) = len(read_part), partial.shape[1:]
    heads, value = w_uv.shape[:2]
    block_a = min(4, triton.next_power_of_2(queries))
    block_l = max(16, triton.next_power_of_2(num_latent))
    block_v = block_v or merge_columns(block_l * w_uv.element_size(), device_shared_bytes(w_uv))
    merge_up_kernel[(triton.cdiv(value, block_v), heads, triton.cdiv(queries, block_a))](
        partial, partial_lse, read_part, w_uv, out, out.stride(0), out.stride(1), queries, first_head,
        HEADS=all_heads, LATENT=num_latent, VALUE=value,
        BLOCK_A=block_a, BLOCK_S=parts // block_a, BLOCK_L=block_l, BLOCK_V=block_v,
        num_warps=8, **overlap(partial),
    )  # fmt: skip


def decode_values(
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
    w_uv: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    config: DecodeConfig | None = None,
    fuse: bool | None = None,
) -> None:
    """As reference.py, for what decode_kernel.decode and value_up can take. fuse: merge parts and apply weights in one
    launch; by default if there are at most MOST_FUSED queries."""
    if q.numel() == 0:  # also on ranks without heads
        return
    config = config or device_config(q, pages, latent)
    index = (pages, tables, slot, first, length, parts, stride, latent, scale)
    if fuse is None:
        fuse = len(q) <= MOST_FUSED
    heads = 0
    if fuse:
        partial = attention_parts(q, *index, config)
        for w in w_uv:
            merge_up(*partial, parts.read_part, w, heads, out[:, heads : heads + len(w)])
            heads += len(w)
        return
    latents = q.new_empty((*q.shape[:2], latent))
    decode(q, *index, latents, None, config=config)
    for w in w_uv:
        value_up(latents[:, heads : heads + len(w)], w, out[:, heads : heads + len(w)])
        heads += len(w)
