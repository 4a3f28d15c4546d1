"""The collectives between threads of one process: for tests, and for models served without MPI.

One rank runs at a time (see baton.py). The last rank to arrive at a collective computes the results for all, in rank
order, and goes on; each rank's results are in new memory. Mistakes that would make MPI hang or deliver garbage are an
error here, at once: ranks in different collectives, or with shapes, dtypes or counts that contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from splash_trt.dist.baton import Baton, Wait
from splash_trt.dist.board import Phase, Watch
from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.rank_sum import rank_order_sum
from splash_trt.dist.traffic import Traffic


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective. Ranks agree when their `signature` is equal."""

    phase: Phase
    inputs: list[torch.Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The part of the input's shape that must be the same on all ranks."""
    counts: tuple[int, ...] = ()
    recv_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def signature(self) -> tuple[object, ...]:
        return self.phase, self.dtype, self.shape, self.counts

    def __str__(self) -> str:
        counts = f", counts {list(self.counts)}" if self.counts else ""
        return f"{self.phase.text} of {self.dtype} {list(self.shape)}{counts}"


@dataclass
class Meeting:
    """The one collective that is going on. One is enough, since no rank leaves it before all have arrived."""

    size: int
    number: int = 0
    calls: dict[int, Call] = field(default_factory=dict)
    results: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.calls]

    def complete(self) -> None:
        """Computes every rank's results. The next collective may begin before all ranks have fetched them."""
        self.results = _compute([self.calls[rank] for rank in range(self.size)])
        self.calls = {}
        self.number += 1


class ThreadCollectives:
    """A `Collectives`; one per rank, all over the same `baton` and `meeting`."""

    def __init__(self, rank: int, meeting: Meeting, baton: Baton, watch: Watch) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._baton = baton
        self._watch = watch
        self._traffic = Traffic(rank, meeting.size)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent to others, per operation (see traffic.py)."""
        return self._traffic.bytes_sent

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        self._traffic.all_reduce(x)
        return self._meet(Call(Phase.ALL_REDUCE, [x], x.dtype, tuple(x.shape)))[0]

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        assert len(counts) == self.size and x.shape[0] == counts[self.rank], (tuple(x.shape), counts)
        self._traffic.all_gather(x)
        return self._meet(Call(Phase.ALL_GATHER, [x], x.dtype, tuple(x.shape[1:]), _ints(counts)))[0]

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert x.is_contiguous(), x.stride()
        assert len(counts) == self.size and x.shape[0] == sum(counts), (tuple(x.shape), counts)
        self._traffic.reduce_scatter(x, counts)
        return self._meet(Call(Phase.REDUCE_SCATTER, [x], x.dtype, tuple(x.shape), _ints(counts)))[0]

    def all_to_all(self, send: Sequence[torch.Tensor], recv_shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        assert len(send) == len(recv_shapes) == self.size, (len(send), len(recv_shapes), self.size)
        assert all(part.is_contiguous() for part in send), [part.stride() for part in send]
        self._traffic.all_to_all(send)
        shapes = tuple(_ints(shape) for shape in recv_shapes)
        return self._meet(Call(Phase.ALL_TO_ALL, list(send), send[0].dtype, (), recv_shapes=shapes))

    def _meet(self, call: Call) -> list[torch.Tensor]:
        meeting = self._meeting
        self._baton.check()
        self._watch.enter(call.phase)
        for other, theirs in meeting.calls.items():
            if theirs.signature != call.signature:
                raise RankFailure(
                    self.rank, f"rank {self.rank} is in {call} while rank {other} is in {theirs}: ranks are out of step"
                )
        meeting.calls[self.rank] = call
        if len(meeting.calls) == self.size:
            meeting.complete()
        number = meeting.number
        if self.rank in meeting.calls:
            what = f"{call.phase.text} (collective {number})"
            self._baton.wait(self.rank, Wait(what, lambda: meeting.number > number, meeting.missing))
        self._watch.leave()
        return meeting.results.pop(self.rank)


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _compute(calls: list[Call]) -> dict[int, list[torch.Tensor]]:
    """Each rank's results, in new memory."""
    first = calls[0]
    ranks = range(len(calls))
    if first.phase is Phase.ALL_REDUCE:
        total = rank_order_sum([call.inputs[0] for call in calls])
        return {rank: [total.clone()] for rank in ranks}
    if first.phase is Phase.ALL_GATHER:
        whole = torch.cat([call.inputs[0] for call in calls])
        return {rank: [whole.clone()] for rank in ranks}
    if first.phase is Phase.REDUCE_SCATTER:
        parts = [call.inputs[0].split(list(first.counts)) for call in calls]
        return {rank: [rank_order_sum([part[rank] for part in parts])] for rank in ranks}
    return {rank: [_delivered(calls, source, rank) for source in ranks] for rank in ranks}


def _delivered(calls: list[Call], source: int, target: int) -> torch.Tensor:
    """A copy of what `source` sends to `target`; RankFailure if `target` expects another shape or dtype."""
    part, expected = calls[source].inputs[target], calls[target].recv_shapes[source]
    if tuple(part.shape) != expected or part.dtype != calls[target].dtype:
        raise RankFailure(
            source,
            f"all_to_all: rank {source} sends {part.dtype} {list(part.shape)} to rank {target}, "
            f"which expects {calls[target].dtype} {list(expected)}: ranks are out of step",
        )
    return part.clone()
