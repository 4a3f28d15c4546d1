"""The routed experts that live on this rank, applied to the tokens routed to them.

T tokens, D hidden, I intermediate, k choices a token, E_r experts here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_experts(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
) -> torch.Tensor:
    """x [T, D]; choice [T, k] int64 expert ids; weight [T, k]; gate_up [E_r, 2 I, D] (gate first); down [E_r, D, I].

    Returns [T, D]: for each token the weighted sum over those of its experts that are first_expert … first_expert +
    E_r - 1, zero where there are none. The sum over ranks is the layer's routed output.
    """
    out = torch.zeros_like(x)
    for local in range(gate_up.shape[0]):
        token, slot = torch.nonzero(choice == first_expert + local, as_tuple=True)
        if len(token) == 0:
            continue
        gate, up = F.linear(x[token], gate_up[local]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[local])
        out.index_add_(0, token, (y * weight[token, slot, None]).to(out.dtype))
    return out
