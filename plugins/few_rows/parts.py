"""What a product leaves to sum, for who has a kernel anyway that can take the sums on its way.

T rows, D columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PartSum:
    """[T, D], not summed yet: the sum of y [T, parts, D] float32 over its parts, in their order."""

    y: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D)"""
        return self.y.shape[0], self.y.shape[2]
