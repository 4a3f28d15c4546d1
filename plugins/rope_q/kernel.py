"""Triton: rotates the queries' rope parts in place, and copies those of decoding tokens into their absorbed queries.

T tokens, the first A of them with absorbed queries, H heads, L KV latent, R rope part, W = L + R. A program takes some
rows of [T H, R]. Reads and writes H R numbers a token, and writes H R more for each of the first A.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs

MOST_ROWS = 64  # of a program
FEW_PROGRAMS = 512  # programs take fewer rows as long as there are at most so many programs


@triton.jit
def load_pairs(rows, live, R: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The first and the second numbers of the pairs that rope rotates, each [ROWS, BLOCK], of the rows at pointers
    `rows` [ROWS, 1]; zeros past R / 2.

    Interleaved pairs are read together, for wide accesses.
    """
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(rows + column, mask=live[:, None] & (column < R), other=0)
        a, b = tl.split(tl.reshape(x, (ROWS, BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        a = tl.load(rows + pair, mask=live[:, None] & (pair < R // 2), other=0)
        b = tl.load(rows + R // 2 + pair, mask=live[:, None] & (pair < R // 2), other=0)
    return a, b


@triton.jit
def store_pairs(rows, a, b, live, R: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of load_pairs."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(rows + column, tl.reshape(tl.join(a, b), (ROWS, 2 * BLOCK)), mask=live[:, None] & (column < R))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        tl.store(rows + pair, a, mask=live[:, None] & (pair < R // 2))
        tl.store(rows + R // 2 + pair, b, mask=live[:, None] & (pair < R // 2))


@triton.jit
def rotate(a, b, cos, sin):
    """The rotation of ops.apply_rope, in float32."""
    return a * cos - b * sin, a * sin + b * cos


@triton.jit(do_not_specialize=["tokens", "num_absorbed"])
def rope_q_kernel(
    q, q_stride, q_head_stride, cos, cos_stride, sin, sin_stride, tokens,
    absorbed, absorbed_stride, absorbed_head_stride, num_absorbed,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, IN_PLACE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    live = token < tokens
    pair = tl.arange(0, BLOCK_R)[None, :]
    inside = live[:, None] & (pair < R // 2)
    rows = (q + token * q_stride + NOPE + head * q_head_stride)[:, None]
    wait_for_inputs(OVERLAP)
    c = tl.load(cos + (token * cos_stride)[:, None] + pair, mask=inside, other=0)
    s = tl.load(sin + (token * sin_stride)[:, None] + pair, mask=inside, other=0)
    x_a, x_b = load_pairs(rows, live, R, INTERLEAVED, ROWS, BLOCK_R)
    a, b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), c, s)
    a, b = a.to(q.dtype.element_ty), b.to(q.dtype.element_ty)
    if IN_PLACE:
        # Several threads may hold the same numbers of a small block: all must have read before one writes.
        tl.debug_barrier()
        store_pairs(rows, a, b, live, R, INTERLEAVED, ROWS, BLOCK_R)
    if absorbed is not None:
        to = (absorbed + token * absorbed_stride + LATENT + head * absorbed_head_stride)[:, None]
        store_pairs(to, a, b, token < num_absorbed, R, INTERLEAVED, ROWS, BLOCK_R)


def rope_q(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    nope: int,
    absorbed: torch.Tensor | None,
    in_place: bool = True,
) -> None:
    """As plugins/rope_q/reference.py; last axes are contiguous, cos and sin float32, q and absorbed of one dtype."""
    tokens, heads, width = q.shape
    if tokens == 0:
        return
    rope = width - nope
    rows = min(MOST_ROWS, max(4, triton.next_power_of_2(triton.cdiv(tokens * heads, FEW_PROGRAMS))))
    rope_q_kernel[(triton.cdiv(tokens * heads, rows),)](
        q, q.stride(0), q.stride(1), cos, cos.stride(0), sin, sin.stride(0), tokens,
        absorbed, *(absorbed.stride()[:2] if absorbed is not None else (0, 0)),
        len(absorbed) if absorbed is not None else 0,
        HEADS=heads, NOPE=nope, LATENT=absorbed.shape[2] - rope if absorbed is not None else 0, R=rope,
        INTERLEAVED=interleaved, ROWS=rows, BLOCK_R=triton.next_power_of_2(rope // 2), IN_PLACE=in_place,
        num_warps=4 if rows > 16 else 1, **overlap(q),
    )  # fmt: skip
