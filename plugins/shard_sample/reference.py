"""Chooses the next token of rows that are greedy, or sampled without filters and penalties, over shards of the
vocabulary, in plain torch.

W rows, V ids of this rank, N ranks. The choice is runtime/sampler.py's for such rows, from the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splash_trt.runtime import noise

MIN_TEMPERATURE = 1e-30
"""Lower temperatures above 0 count as this one, so that logit / temperature stays finite."""

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
    """Fills score [W] float64 and id [W] int64: each row's best id in this shard, and its score.

    logits [W, V]: of ids first_id … first_id + V - 1; rows may be strided. temperature [W] float64 or float32, at most
    100. With temperature 0 an id's score is its logit; above 0 it is logit / temperature + noise. seed, position [W]
    int64: the noise's keys (runtime/noise.py). Ties go to the lowest id. NaN and +inf count as -inf; where no logit is
    above -inf, as with V = 0, the score is -inf and the id is first_id.
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
    """Fills tokens [W] int64 from the ranks' best ids: the one with the highest score, of equal ones the lowest.

    found [N, W, 2] float64: the score, and the id, as an int64 in the 64 bits of the second number.
    """
    score, ids = found[..., 0], found.view(torch.int64)[..., 1]
    last = torch.iinfo(torch.int64).max
    tokens.copy_(ids.masked_fill(score < score.amax(0), last).amin(0))
