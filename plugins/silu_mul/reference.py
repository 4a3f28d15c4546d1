"""A gated MLP's activation, in plain torch. T tokens, I intermediate."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] (gate first) -> silu(gate) * up [T, I], computed in float32 or wider and rounded once."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
