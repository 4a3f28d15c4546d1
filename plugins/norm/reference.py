"""Adds a layer's output to the residual and normalises the sum, in plain torch.

T tokens, D hidden.
"""

from __future__ import annotations

import torch

from splash_engines import ops


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """hidden [T, D] += delta [T, D], if there is one, in place; out [T, D] = RMS norm of the rounded sum, times weight
    [D]."""
    if delta is not None:
        hidden.add_(delta)
    out.copy_(ops.rms_norm(hidden, weight, eps))
