"""Rotates the queries' rope parts, in plain torch.

T tokens, the first A of them with absorbed queries, H heads, L KV latent, R rope part, W = L + R.
"""

from __future__ import annotations

import torch

from splash_engines import ops


def rope_q(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    nope: int,
    absorbed: torch.Tensor | None,
    in_place: bool = True,
) -> None:
    """Rotates the last R numbers of q [T, H, nope + R], with in_place where they lie; and writes those of the first A
    tokens to the last R numbers of absorbed [A, H, W], if there is one.

    cos, sin [T, R / 2], float32 or wider.
    """
    rotated = ops.apply_rope(q[..., nope:], cos, sin, interleaved)
    if in_place:
        q[..., nope:] = rotated
    if absorbed is not None:
        absorbed[..., absorbed.shape[2] - rotated.shape[2] :] = rotated[: len(absorbed)]
