"""The collective operations between the ranks of one model, as the runtime sees them.

Implementations: MPI on CPU tensors; MPI by way of the host's memory, for ranks that share a GPU; threads of one process
(tests, and LLM without MPI); NCCL on GPUs. Every rank makes the same calls in the same order. All of them know `counts`
and shapes from the plan, so no size is ever sent. A rank with nothing to send or receive calls all the same. Sums are
taken in float32 or wider, and in rank order unless a library chooses the order (NCCL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class RankFailure(RuntimeError):
    """A rank failed or missed a deadline; `rank` is the one to look at, -1 if unknown."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Collectives(Protocol):
    """The operations, called by rank `rank` of `size`. Inputs are contiguous, and are not changed unless said so."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, which has any shape, the same on all ranks. The result may be in x's memory: do not
        use x afterwards."""
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
