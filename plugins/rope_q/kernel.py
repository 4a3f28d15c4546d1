"""Triton: rotate the queries' rope parts where they stand, and put decoding tokens' also into their absorbed queries.

T tokens, A of them (the first) with absorbed queries, H heads, L kv latent, R rope part, W = L + R. A program takes one
token's blocks of heads. Reads and writes H R numbers a token, and writes H R more for each of the first A.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_HEADS = 32  # a program


@triton.jit
def pair_columns(R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of the first and the second of each pair; R, which is outside, for pairs past R / 2."""
    pair = tl.arange(0, BLOCK)
    if INTERLEAVED:
        a, b = 2 * pair, 2 * pair + 1
    else:
        a, b = pair, pair + R // 2
    return tl.where(pair < R // 2, a, R), tl.where(pair < R // 2, b, R)


@triton.jit
def rotate(a, b, cos, sin):
    """As ops.apply_rope, in float32."""
    return a * cos - b * sin, a * sin + b * cos


@triton.jit(do_not_specialize=["num_absorbed"])
def rope_q_kernel(
    q, q_stride, q_head_stride, cos, cos_stride, sin, sin_stride,
    absorbed, absorbed_stride, absorbed_head_stride, num_absorbed,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    a_column, b_column = pair_columns(R, INTERLEAVED, BLOCK_R)
    pair = tl.arange(0, BLOCK_R)
    c = tl.load(cos + token * cos_stride + pair, mask=pair < R // 2, other=0)[None, :]
    s = tl.load(sin + token * sin_stride + pair, mask=pair < R // 2, other=0)[None, :]
    live = (head < HEADS)[:, None] & (pair < R // 2)[None, :]
    rows = (q + token * q_stride + NOPE + head * q_head_stride)[:, None]
    x_a = tl.load(rows + a_column[None, :], mask=live, other=0).to(tl.float32)
    x_b = tl.load(rows + b_column[None, :], mask=live, other=0).to(tl.float32)
    a, b = rotate(x_a, x_b, c, s)
    a, b = a.to(q.dtype.element_ty), b.to(q.dtype.element_ty)
    # A small block lies in several threads at once: all have read before one writes.
    tl.debug_barrier()
    tl.store(rows + a_column[None, :], a, mask=live)
    tl.store(rows + b_column[None, :], b, mask=live)
    if absorbed is not None:
        if token < num_absorbed:
            to = (absorbed + token * absorbed_stride + LATENT + head * absorbed_head_stride)[:, None]
            tl.store(to + a_column[None, :], a, mask=live)
            tl.store(to + b_column[None, :], b, mask=live)


def rope_q(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    nope: int,
    absorbed: torch.Tensor | None,
) -> None:
    """As plugins/rope_q/reference.py; last axes are contiguous, cos and sin float32, q and absorbed of one dtype."""
    tokens, heads, width = q.shape
    if tokens == 0:
        return
    rope = width - nope
    block_h = min(MOST_HEADS, triton.next_power_of_2(heads))
    block_r = triton.next_power_of_2(rope // 2)
    rope_q_kernel[(tokens, triton.cdiv(heads, block_h))](
        q, q.stride(0), q.stride(1), cos, cos.stride(0), sin, sin.stride(0),
        absorbed, *(absorbed.stride()[:2] if absorbed is not None else (0, 0)),
        len(absorbed) if absorbed is not None else 0,
        HEADS=heads, NOPE=nope, LATENT=absorbed.shape[2] - rope if absorbed is not None else 0, R=rope,
        INTERLEAVED=interleaved, BLOCK_H=block_h, BLOCK_R=block_r,
        num_warps=max(1, min(4, block_h * block_r // 128)),
    )  # fmt: skip
