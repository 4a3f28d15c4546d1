"""Computes absorbed queries, whose products with latent rows are the scores, in plain torch.

A queries, H heads, L KV latent, R rope part, W = L + R.
"""

from __future__ import annotations

import torch

from splash_engines import ops


def absorb(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, w_uk: torch.Tensor, out: torch.Tensor
) -> None:
    """Writes out [A, H, W]: q's nope part times w_uk, and its rope part rotated. q [A, H, nope + R], not rotated, stays
    as it is; w_uk [H, nope, L]; cos, sin [A, R / 2]."""
    nope, latent = w_uk.shape[1:]
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
    out[..., latent:] = ops.apply_rope(q[..., nope:], cos, sin, interleaved)
