"""Triton: computes absorbed queries. For few tokens this is one launch; for many, torch's product and a rotation.

A queries, H heads, L KV latent, R rope part, W = L + R. A program takes one head, up to 64 queries, and a tile of the
latent's columns or, in the program after the last tile, the rope part. The time is that of reading H nope L weights,
which begins before the queries are there.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.overlap_kernel import overlap, wait_for_inputs
from splash_plugins.rope_q.kernel import load_pairs, rope_q, rotate, store_pairs

MOST_QUERIES = 64
BLOCK_L = 32


@triton.jit(do_not_specialize=["queries"])
def absorb_kernel(
    q, q_stride, q_head_stride, cos, cos_stride, sin, sin_stride, w_uk, out, out_stride, out_head_stride, queries,
    NOPE: tl.constexpr, LATENT: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    a = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    rows = q + a[:, None] * q_stride + head * q_head_stride
    to = out + a[:, None] * out_stride + head * out_head_stride
    column = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    if tl.program_id(0) * BLOCK_L < LATENT:
        k = tl.arange(0, BLOCK_K)
        inside = (k < NOPE)[:, None] & (column < LATENT)[None, :]
        w = tl.load(w_uk + (head * NOPE + k[:, None]) * LATENT + column[None, :], mask=inside, other=0)
        wait_for_inputs(OVERLAP)
        x = tl.load(rows + k[None, :], mask=(a < queries)[:, None] & (k < NOPE)[None, :], other=0)
        result = tl.dot(x, w, input_precision="ieee")
        kept = (a < queries)[:, None] & (column < LATENT)[None, :]
        tl.store(to + column[None, :], result.to(out.dtype.element_ty), mask=kept)
    else:
        pair = tl.arange(0, BLOCK_R)
        live = (a < queries)[:, None] & (pair < R // 2)[None, :]
        wait_for_inputs(OVERLAP)
        c = tl.load(cos + a[:, None] * cos_stride + pair[None, :], mask=live, other=0)
        s = tl.load(sin + a[:, None] * sin_stride + pair[None, :], mask=live, other=0)
        x_a, x_b = load_pairs(rows + NOPE, a < queries, R, INTERLEAVED, BLOCK_A, BLOCK_R)
        y_a, y_b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), c, s)
        element = out.dtype.element_ty
        store_pairs(to + LATENT, y_a.to(element), y_b.to(element), a < queries, R, INTERLEAVED, BLOCK_A, BLOCK_R)


def absorb(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, w_uk: torch.Tensor, out: torch.Tensor
) -> None:
    """As plugins/absorb/reference.py.

    w_uk is contiguous, q and out in their last axes; cos and sin are float32, the rest of one dtype.
    """
    queries, heads, width = q.shape
    nope, latent = w_uk.shape[1:]
    if queries == 0:
        return
    if queries > MOST_QUERIES or nope > 256:
        torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
        rope_q(q, cos, sin, interleaved, nope, out, in_place=False)
        return
    block_a = max(16, triton.next_power_of_2(queries))
    absorb_kernel[(triton.cdiv(latent, BLOCK_L) + 1, heads, triton.cdiv(queries, block_a))](
        q, q.stride(0), q.stride(1), cos, cos.stride(0), sin, sin.stride(0), w_uk, out, out.stride(0), out.stride(1),
        queries,
        NOPE=nope, LATENT=latent, R=width - nope, INTERLEAVED=interleaved,
        BLOCK_A=block_a, BLOCK_K=max(16, triton.next_power_of_2(nope)), BLOCK_L=BLOCK_L,
        BLOCK_R=triton.next_power_of_2((width - nope) // 2),
        num_warps=4, **overlap(q),
    )  # fmt: skip
