"""A product's result in parts that are still to be added up, which the next kernel can do as it reads them.

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
