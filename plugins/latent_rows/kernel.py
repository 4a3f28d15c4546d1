"""Triton: makes normed query latents and cache rows of the down projections, in one launch.

T tokens, Q query latent, L KV latent, R rope part, W = L + R; P pages of S rows. One program for each token's cache row
and, if there is a query latent, another one for that. Reads Q + W and writes Q + 2 W numbers a token (W more where
there is a target).
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.norm.kernel import norm_warps, rms_scaled
from splash_plugins.overlap_kernel import overlap, wait_for_inputs
from splash_plugins.rope_q.kernel import load_pairs, rotate, store_pairs


@triton.jit
def _store_row(row, column, latent, a, b, L: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
               BLOCK_R: tl.constexpr):  # fmt: skip
    tl.store(row + column, latent, mask=column < L)
    store_pairs(row + L + tl.zeros((1, 1), tl.int32), a, b, tl.full((1,), 1, tl.int1), R, INTERLEAVED, 1, BLOCK_R)


@triton.jit
def _normed(source, norm, eps, to, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    column = tl.arange(0, BLOCK)
    weight = tl.load(norm + column, mask=column < SIZE, other=0)
    wait_for_inputs(OVERLAP)
    x = tl.load(source + column, mask=column < SIZE, other=0).to(tl.float32)
    tl.store(to + column, rms_scaled(x, weight, eps, SIZE).to(to.dtype.element_ty), mask=column < SIZE)


@triton.jit
def latent_rows_kernel(
    qkv, qkv_stride, q_norm, kv_norm, eps,
    cos, cos_stride, sin, sin_stride,
    latent, latent_stride, rows, rows_stride,
    pages, page_stride, row_stride,
    page, offset, target_page, target_offset,
    Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source = qkv + token * qkv_stride
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_L)
        weight = tl.load(kv_norm + column, mask=column < L, other=0)
        to = tl.load(page + token).to(tl.int64)
        place = tl.load(offset + token)
        wait_for_inputs(OVERLAP)
        x = tl.load(source + Q + column, mask=column < L, other=0).to(tl.float32)
        pair = tl.arange(0, BLOCK_R)[None, :]
        c = tl.load(cos + token * cos_stride + pair, mask=pair < R // 2, other=0)
        s = tl.load(sin + token * sin_stride + pair, mask=pair < R // 2, other=0)
        one = tl.full((1,), 1, tl.int1)
        k_a, k_b = load_pairs(source + Q + L + tl.zeros((1, 1), tl.int32), one, R, INTERLEAVED, 1, BLOCK_R)
        element = rows.dtype.element_ty
        kv = rms_scaled(x, weight, eps, L).to(element)
        a, b = rotate(k_a.to(tl.float32), k_b.to(tl.float32), c, s)
        a, b = a.to(element), b.to(element)
        _store_row(rows + token * rows_stride, column, kv, a, b, L, R, INTERLEAVED, BLOCK_R)
        if to >= 0:
            row = pages + to * page_stride + place * row_stride
            _store_row(row, column, kv, a, b, L, R, INTERLEAVED, BLOCK_R)
        if target_page is not None:
            to = tl.load(target_page + token).to(tl.int64)
            if to >= 0:
                row = pages + to * page_stride + tl.load(target_offset + token) * row_stride
                _store_row(row, column, kv, a, b, L, R, INTERLEAVED, BLOCK_R)
    elif latent is not None:
        _normed(source, q_norm, eps, latent + token * latent_stride, Q, BLOCK_Q, OVERLAP)


def latent_rows(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latent: torch.Tensor | None,
    rows: torch.Tensor,
    pages: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    target_page: torch.Tensor | None,
    target_offset: torch.Tensor | None,
) -> None:
    """As plugins/latent_rows/reference.py; last axes are contiguous, cos and sin float32, the rest of one dtype."""
    tokens, width = rows.shape
    if tokens == 0:
        return
    assert (latent is None) == (q_norm is None) and (target_page is None) == (target_offset is None)
    num_q, num_latent = qkv.shape[1] - width, kv_norm.shape[0]
    block_q, block_l = triton.next_power_of_2(max(num_q, 1)), triton.next_power_of_2(num_latent)
    latent_rows_kernel[(tokens, 1 if latent is None else 2)](
        qkv, qkv.stride(0), q_norm, kv_norm, eps,
        cos, cos.stride(0), sin, sin.stride(0),
        latent, latent.stride(0) if latent is not None else 0, rows, rows.stride(0),
        pages, pages.stride(0), pages.stride(1),
        page, offset, target_page, target_offset,
        Q=num_q, L=num_latent, R=width - num_latent, INTERLEAVED=interleaved,
        BLOCK_Q=block_q, BLOCK_L=block_l, BLOCK_R=triton.next_power_of_2((width - num_latent) // 2),
        num_warps=norm_warps(max(block_q, block_l)), **overlap(rows),
    )  # fmt: skip
