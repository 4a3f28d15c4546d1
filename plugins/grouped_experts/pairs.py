"""The experts' results before a token's are added up, which the next kernel can do as it reads them.

T tokens, D hidden, k choices a token, P = T * k pairs (pair p is choice p % k of token p // k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PairSum:
    """[T, D], not summed yet: addend [T, D] plus, of each token's pairs whose expert is one of `num_experts` from
    `first_expert` on, weight [T, k] times y [P, D]; in float32 in the order of choices, rounded once to y's dtype.

    Rows of y whose expert (choice [T, k] int32) is another may hold anything.
    """

    y: torch.Tensor
    choice: torch.Tensor
    weight: torch.Tensor
    first_expert: int
    num_experts: int
    addend: torch.Tensor | None
    joined: bool
    """Whether the stream has waited for another since its last kernel, for overlap_kernel.overlap's after_join."""

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D)"""
        return len(self.choice), self.y.shape[1]
