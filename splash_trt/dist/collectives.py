"""The exchanges of data between the ranks of one model, as the runtime sees them.

Three implementations: MPI on CPU tensors, threads of one process (tests, and LLM without MPI), NCCL on GPUs.
Every rank makes the same calls in the same order; `counts` and shapes are known to all of them from the plan, so no
size is ever sent. A rank with nothing to give or to get still calls. Sums are taken in float32 or wider and in rank
order where the implementation can choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class RankFailure(RuntimeError):
    """Another rank failed or did not come within the deadline; `rank` is the one to look at, -1 if unknown."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Collectives(Protocol):
    """Rank `rank` of `size`. N below is `size`. Inputs are contiguous and not changed unless said."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's x, any shape, the same on all ranks. May reuse x's memory: x is dead afterwards."""
        ...

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """x [counts[rank], ...] of each rank, stacked in rank order: [sum(counts), ...]."""
        ...

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """x [sum(counts), ...] summed over ranks; each rank gets its own part [counts[rank], ...]."""
        ...

    def all_to_all(self, send: Sequence[torch.Tensor], recv_shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """send[j] goes to rank j; returns what each rank i sent here, of shape recv_shapes[i], in send's dtype.

        Zero-element tensors are allowed anywhere; shapes may differ freely between pairs of ranks.
        """
        ...
