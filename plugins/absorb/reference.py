"""From queries to absorbed queries, which score latent rows directly, plain torch.

A queries, H heads, L kv latent, R rope part, W = L + R.
"""

from __future__ import annotations

import torch

from splash_engines import ops


def absorb(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, w_uk: torch.Tensor, out: torch.Tensor
) -> None:
    """q [A, H, nope + R], not rotated and left so; w_uk [H, nope, L]; cos, sin [A, R / 2]. Writes out [A, H, W]."""
    nope, latent = w_uk.shape[1:]
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
    out[..., latent:] = ops.apply_rope(q[..., nope:], cos, sin, interleaved)
