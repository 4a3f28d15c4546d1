"""Triton: from the down projections to normed latents and cache rows, in one launch.

T tokens, Q query latent, L kv latent, R rope part, W = L + R; P pages of S rows. One program a token's row and, where
there is a query latent, one more a token for that. Reads Q + W and writes Q + 2 W numbers a token.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.norm.kernel import norm_warps, rms_scaled
from splash_plugins.rope_q.kernel import pair_columns, rotate


@triton.jit
def _store_row(row, latent_column, latent, a_column, b_column, a, b, L: tl.constexpr, R: tl.constexpr):
    tl.store(row + latent_column, latent, mask=latent_column < L)
    tl.store(row + L + a_column, a, mask=a_column < R)
    tl.store(row + L + b_column, b, mask=b_column < R)


@triton.jit
def _normed(source, norm, eps, to, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    weight = tl.load(norm + column, mask=column < SIZE, other=0)
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
    BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source = qkv + token * qkv_stride
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_L)
        weight = tl.load(kv_norm + column, mask=column < L, other=0)
        x = tl.load(source + Q + column, mask=column < L, other=0).to(tl.float32)
        kv = rms_scaled(x, weight, eps, L).to(rows.dtype.element_ty)
        a_column, b_column = pair_columns(R, INTERLEAVED, BLOCK_R)
        pair = tl.arange(0, BLOCK_R)
        c = tl.load(cos + token * cos_stride + pair, mask=pair < R // 2, other=0)
        s = tl.load(sin + token * sin_stride + pair, mask=pair < R // 2, other=0)
        k_a = tl.load(source + Q + L + a_column, mask=a_column < R, other=0).to(tl.float32)
        k_b = tl.load(source + Q + L + b_column, mask=b_column < R, other=0).to(tl.float32)
        a, b = rotate(k_a, k_b, c, s)
        a, b = a.to(rows.dtype.element_ty), b.to(rows.dtype.element_ty)
        _store_row(rows + token * rows_stride, column, kv, a_column, b_column, a, b, L, R)
        to = tl.load(page + token).to(tl.int64)
        if to >= 0:
            row = pages + to * page_stride + tl.load(offset + token) * row_stride
            _store_row(row, column, kv, a_column, b_column, a, b, L, R)
        if target_page is not None:
            to = tl.load(target_page + token).to(tl.int64)
            if to >= 0:
                row = pages + to * page_stride + tl.load(target_offset + token) * row_stride
                _store_row(row, column, kv, a_column, b_column, a, b, L, R)
    elif latent is not None:
        _normed(source, q_norm, eps, latent + token * latent_stride, Q, BLOCK_Q)


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
        num_warps=norm_warps(max(block_q, block_l)),
    )  # fmt: skip
