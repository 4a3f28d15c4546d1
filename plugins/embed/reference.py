"""The embedding of a step's tokens, in plain torch. T tokens, D hidden, V_r rows of the vocabulary on this rank."""

from __future__ import annotations

import torch


def embed(
    ids: torch.Tensor,
    slot: torch.Tensor,
    last_sampled: torch.Tensor,
    table: torch.Tensor,
    first_id: int,
    out: torch.Tensor,
) -> None:
    """Fills out [T, D] with rows of table [V_r, D], which holds ids first_id … first_id + V_r - 1.

    ids [T] int32: an id, or -1 for the id last sampled for the token's slot; slot [T] int32, -1 for none; last_sampled
    [slots] int64. Zeros where the id is another rank's, and for padding (id and slot both -1).
    """
    sampled = last_sampled[slot.clamp(min=0).long()]
    wanted = torch.where(ids >= 0, ids.long(), torch.where(slot >= 0, sampled, -1))
    local = wanted - first_id
    here = (wanted >= 0) & (local >= 0) & (local < len(table))
    out.zero_()
    out[here] = table[local[here]]
