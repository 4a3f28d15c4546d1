"""The four collectives built on one operation, `_exchange`, for implementations over a message-passing library.

A subclass supplies `_exchange`, which sends each rank's tensors to each other rank. Sums are taken here, in rank order:
so they have the same bits on every rank and in every implementation, and do not depend on what dtypes the library can
add (Open MPI silently adds bf16 as integers).

An all_reduce is a reduce_scatter of an even split followed by an all_gather, which sends as few bytes as a ring does. A
small all_reduce, or any between two ranks (where it sends no more), gathers all inputs and adds them on each rank: one
round instead of two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from splash_trt.dist.board import Phase, Watch
from splash_trt.dist.rank_sum import even_split, rank_order_sum
from splash_trt.dist.traffic import Traffic

SMALL_BYTES = 32768


class ExchangeCollectives(ABC):
    """A `Collectives` over `_exchange`."""

    def __init__(self, rank: int, size: int, watch: Watch) -> None:
        self.rank = rank
        self.size = size
        self._watch = watch
        self._traffic = Traffic(rank, size)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent to others, per operation (see traffic.py)."""
        return self._traffic.bytes_sent

    @abstractmethod
    def _exchange(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> None:
        """Fills recv[i] with rank i's send[rank] for all i != rank; entry `rank` of both is ignored.

        All tensors are contiguous and may have zero elements; sizes agree between sender and receiver.
        """

    def _gather(self, x: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> None:
        """Fills flat `out` [sum(counts)] with every rank's flat x [counts[rank]], in rank order, its own included."""
        parts = out.split(list(counts))
        parts[self.rank].copy_(x)
        self._exchange([x] * self.size, parts)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        if self.size == 1 or x.numel() == 0:
            return x
        self._watch.enter(Phase.ALL_REDUCE)
        self._traffic.all_reduce(x)
        flat = x.reshape(-1)
        if self.size == 2 or flat.nbytes <= SMALL_BYTES:
            parts = flat.new_empty(self.size, flat.numel())
            self._gather(flat, parts.reshape(-1), [flat.numel()] * self.size)
            flat = rank_order_sum(parts.unbind(0))
        else:
            counts = even_split(flat.numel(), self.size)
            self._gather(self._reduce_own(flat.split(counts)), flat, counts)
        self._watch.leave()
        return flat.reshape(x.shape)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        assert len(counts) == self.size and x.shape[0] == counts[self.rank], (tuple(x.shape), counts)
        out = x.new_empty(sum(counts), *x.shape[1:])
        if self.size == 1:
            return out.copy_(x)
        if out.numel():
            self._watch.enter(Phase.ALL_GATHER)
            self._traffic.all_gather(x)
            row = out[0].numel()
            self._gather(x.reshape(-1), out.reshape(-1), [count * row for count in counts])
            self._watch.leave()
        return out

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        assert len(counts) == self.size and x.shape[0] == sum(counts), (tuple(x.shape), counts)
        if self.size == 1 or x.numel() == 0:
            return x.split(list(counts))[self.rank].clone()
        self._watch.enter(Phase.REDUCE_SCATTER)
        self._traffic.reduce_scatter(x, counts)
        out = self._reduce_own(x.split(list(counts)))
        self._watch.leave()
        return out

    def all_to_all(self, send: Sequence[torch.Tensor], recv_shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        assert len(send) == len(recv_shapes) == self.size, (len(send), len(recv_shapes), self.size)
        assert all(part.is_contiguous() for part in send), [part.stride() for part in send]
        own = send[self.rank]
        assert tuple(own.shape) == tuple(recv_shapes[self.rank]), (own.shape, recv_shapes[self.rank])
        recv = [own.new_empty(*shape) for shape in recv_shapes]
        recv[self.rank].copy_(own)
        if self.size > 1:
            self._watch.enter(Phase.ALL_TO_ALL)
            self._traffic.all_to_all(send)
            self._exchange(send, recv)
            self._watch.leave()
        return recv

    def _reduce_own(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sends parts[j] to each rank j, and returns the sum over all ranks of their parts[rank]."""
        own = parts[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        self._exchange(parts, received)
        return rank_order_sum(received)
