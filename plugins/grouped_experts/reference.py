"""The routed experts of this rank, applied to the tokens that are routed to them, in plain torch.

T tokens, D hidden, I intermediate, k choices a token, E_r experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

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

    Returns [T, D]: each token's weighted sum over those of its experts that are among first_expert … first_expert +
    E_r - 1; zeros where there are none. The sum over ranks is the layer's routed output.
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


def sum_of_experts(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    ready: Callable[[], None] | None = None,
    defer: bool = False,
) -> None:
    """Fills out [T, D] with addend [T, D] plus the weighted sum over each token's experts on this rank, as kernel.py's
    grouped_experts does.

    x [T, D]; choice [T, k] int32 expert ids, -1 for none; weight [T, k] float32; gate_up [E_r, 2 I, D] or
    [E_r, 2, I, D] (gate first); down [E_r, D, I]. The sum is taken in float32 or wider, in the order of choices; then
    the addend is added and the result rounded once. ready: called before addend is read. defer: has no effect here.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    num_choices = choice.shape[1]
    parts = x.new_zeros((choice.numel(), x.shape[1]), dtype=wide)
    flat, weights = choice.flatten(), weight.reshape(-1, 1).to(wide)
    for expert in sorted(set(flat.tolist())):
        local = expert - first_expert
        if not 0 <= local < len(down):
            continue
        place = torch.nonzero(flat == expert)[:, 0]
        gate, up = F.linear(x[place // num_choices], gate_up[local].reshape(-1, x.shape[1])).chunk(2, dim=-1)
        parts[place] = F.linear(F.silu(gate) * up, down[local]) * weights[place]
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for j in range(num_choices):
        total += parts[j::num_choices]
    if ready is not None:
        ready()
    if addend is not None:
        total += addend.to(wide)
    out.copy_(total)
