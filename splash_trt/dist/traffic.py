"""Bytes that a rank sends to other ranks, counted per operation.

The count is that of an ideal implementation, whatever the library really does: each byte once for each rank that needs
it, and an all_reduce as a reduce_scatter of an even split followed by an all_gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splash_trt.dist.rank_sum import even_split


class Traffic:
    """`bytes_sent[operation]`: bytes that this rank has sent to others since the start."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.bytes_sent = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), 0)

    def all_reduce(self, x: torch.Tensor) -> None:
        own = even_split(x.numel(), self._size)[self._rank]
        others = self._size - 1
        self.bytes_sent["all_reduce"] += (x.numel() - own + own * others) * x.element_size()

    def all_gather(self, x: torch.Tensor) -> None:
        self.bytes_sent["all_gather"] += (self._size - 1) * x.nbytes

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> None:
        if x.shape[0]:
            self.bytes_sent["reduce_scatter"] += x.nbytes // x.shape[0] * (x.shape[0] - counts[self._rank])

    def all_to_all(self, send: Sequence[torch.Tensor]) -> None:
        self.bytes_sent["all_to_all"] += sum(part.nbytes for rank, part in enumerate(send) if rank != self._rank)
