"""Sums over ranks, added one after another in rank order, so that every implementation gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rank_order_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """parts[0] + parts[1] + …, in new memory, in the parts' shape and dtype.

    16-bit floats are added in float32 and rounded once at the end.
    """
    dtype = parts[0].dtype
    total = parts[0].to(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def even_split(total: int, num_parts: int) -> list[int]:
    """`num_parts` counts that add up to `total` and differ by at most one, the larger first."""
    base, extra = divmod(total, num_parts)
    return [base + (part < extra) for part in range(num_parts)]
