"""A product's result in parts that are still to be added up: the next kernel can do that as it reads them.

T rows, D columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PartSum:
    """A tensor [T, D] that is still to be summed: y [T, parts, D] float32 over its parts, in their order."""

    y: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D)"""
        return self.y.shape[0], self.y.shape[2]
