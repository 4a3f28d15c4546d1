"""Products of rows with weights, in plain torch.

T rows, K numbers each, N columns of the result; I inner columns of a gated activation.
"""

from __future__ import annotations

import torch

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.silu_mul.reference import silu_mul


def linear(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """x [T, K] times the transpose of w [N, K] into out [T, N]."""
    torch.mm(x, w.t(), out=out)


def linear_parts(x: torch.Tensor, w: torch.Tensor) -> PartSum | None:
    """`linear` with its result left in parts that are still to be summed, or None, and then nothing is done. Here
    always None."""
    return None


def gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(x gateᵀ) * (x upᵀ), [T, I], for x [T, K] and gate_up [2, I, K]; both products are rounded first."""
    return silu_mul(torch.mm(x, gate_up.flatten(0, 1).t()))
