"""The experts' results, not yet summed over a token's choices: the next kernel can sum them as it reads them.

T tokens, D hidden, k choices a token, P = T * k pairs (pair p is choice p % k of token p // k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PairSum:
    """A tensor [T, D] that is still to be summed: addend [T, D] plus the sum of weight [T, k] times y [P, D] over those
    of a token's pairs whose expert (choice [T, k] int32) is one of the `num_experts` from `first_expert` on. The sum is
    taken in float32 in the order of choices and rounded once, to y's dtype.

    Rows of y for pairs of other experts may hold anything.
    """

    y: torch.Tensor
    choice: torch.Tensor
    weight: torch.Tensor
    first_expert: int
    num_experts: int
    addend: torch.Tensor | None
    joined: bool
    """Whether the stream has waited for another one since its last kernel (after_join of overlap_kernel.overlap)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D)"""
        return len(self.choice), self.y.shape[1]
