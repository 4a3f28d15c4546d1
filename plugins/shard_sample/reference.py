"""The choice of rows that are greedy or plainly drawn (no filter, no penalty) over shards of a vocabulary.

W rows, V ids of this rank, N ranks. What runtime/sampler.py chooses for such rows, from the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splash_trt.runtime import noise

MIN_TEMPERATURE = 1e-30
"""Lower temperatures above 0 count as this: logit / temperature stays finite."""

_NEVER = float("-inf")


def best_of_shard(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    first_id: int,
    score: Tensor,
    id: Tensor,
) -> None:
    """Fills score [W] float64 and id [W] int64: of each row, the best id of this shard and how good it is.

    logits [W, V]: of ids first_id … first_id + V - 1; rows may be strided. temperature [W] float64 or float32, at most
    100; 0: the score is the largest logit. Above 0 it is the largest logit / temperature + noise. seed, position [W]
    int64: as runtime/noise.py has them. Ties go to the lowest id. NaN and +inf count as -inf; where nothing is above
    that, as with V = 0, the score is -inf and the id is first_id.
    """
    if len(logits) == 0:
        return
    if logits.shape[1] == 0:
        score.fill_(_NEVER)
        id.fill_(first_id)
        return
    clean = logits.nan_to_num(nan=_NEVER, posinf=_NEVER, neginf=_NEVER)
    steps = noise.id_steps(first_id, clean.shape[1], clean.device)
    tempered = clean / temperature.double().clamp(min=MIN_TEMPERATURE)[:, None]
    noisy = noise.gumbel(noise.row_keys(seed, position), steps).add_(tempered)
    value, column = torch.where(temperature[:, None] > 0, noisy, clean.double()).max(1)  # the first of equals
    score.copy_(value)
    id.copy_(column + first_id)


def best_of_shards(found: Tensor, tokens: Tensor) -> None:
    """Fills tokens [W] int64 from every rank's best: the highest score's id, the lowest of those that tie.

    found [N, W, 2] float64: score, and id as an int64 in the same 64 bits.
    """
    score, ids = found[..., 0], found.view(torch.int64)[..., 1]
    last = torch.iinfo(torch.int64).max
    tokens.copy_(ids.masked_fill(score < score.amax(0), last).amin(0))
