"""The choice of each token's experts, in plain torch: as engines/ops.route, but ties go to the lowest id, and there may
be padding rows.

T tokens, D hidden, E experts, k chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from splash_trt.models.config import Experts, GroupScore, Scoring


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Fills choice [T, k] int32 and weight [T, k] float32 from x [T, D], router [E, D] and bias [E] float32.

    num_tokens [1] int32: rows from this one on are padding and get choice -1 and weight 0.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    choose(F.linear(x.to(wide), router.to(wide)), bias, experts, num_tokens, choice, weight)


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """As route, but from logits [T, E], in float32 or wider."""
    scores = logits.sigmoid() if experts.scoring is Scoring.SIGMOID else logits.softmax(dim=-1)
    ranking = scores if bias is None else scores + bias
    if experts.num_groups > 1:
        grouped = ranking.unflatten(-1, (experts.num_groups, -1))
        if experts.group_score is GroupScore.TOP2_SUM:
            group = grouped.topk(2, dim=-1).values.sum(dim=-1)
        else:
            group = grouped.amax(dim=-1)
        kept = torch.zeros_like(group, dtype=torch.bool)
        kept.scatter_(1, _best(group, experts.top_groups), True)
        ranking = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    chosen = _best(ranking, experts.top_k)
    value = scores.gather(1, chosen)
    if experts.normalize:
        value = value / (value.sum(dim=-1, keepdim=True) + 1e-20)
    padding = torch.arange(len(logits), device=logits.device)[:, None] >= num_tokens
    choice.copy_(chosen.masked_fill(padding, -1))
    weight.copy_((value * experts.scale).masked_fill(padding, 0.0))


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """The columns of each row's k largest values, best first, equal ones in order (which topk does not promise)."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
