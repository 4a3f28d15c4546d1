"""Rotate the queries' rope parts, plain torch.

T tokens, A of them (the first) with absorbed queries, H heads, L kv latent, R rope part, W = L + R.
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
    """q [T, H, nope + R]: its last R in place, unless it is to be left alone; absorbed [A, H, W] gets those of the
    first A tokens as its last R.

    cos, sin [T, R / 2], float32 or wider.
    """
    rotated = ops.apply_rope(q[..., nope:], cos, sin, interleaved)
    if in_place:
        q[..., nope:] = rotated
    if absorbed is not None:
        absorbed[..., absorbed.shape[2] - rotated.shape[2] :] = rotated[: len(absorbed)]
