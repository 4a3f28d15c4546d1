"""Which of the other ranks' heads lie in each simulated rank's overlay, as intervals of numbers."""

from __future__ import annotations

from splash_trt.layout.spec import Residency
from splash_trt.migration.diff import Sizes


class SimulatedWeights:
    """Heads arrive part by part, each once in a switch; a cache row written to the overlay destroys them."""

    def __init__(self, sizes: Sizes, residency: Residency) -> None:
        ranks = range(len(sizes.heads))
        self._wanted = {
            (target, source, tensor): sizes.heads[source] * numbers
            for target in ranks
            for source in ranks
            for tensor, numbers in enumerate(sizes.head_numbers)
            if source != target and sizes.heads[source]
        }
        self._residency = residency
        whole = residency is Residency.FULL
        self._arrived = {key: [(0, count)] if whole else [] for key, count in self._wanted.items()}

    def take_effect(self, residency: Residency, begins: bool, new_attempt: bool) -> None:
        """A plan with this residency comes; it begins an epoch, or a switch or its end. What was only on its way, or is
        no longer wanted, counts for nothing."""
        if begins:
            self._residency = residency
        assert residency is self._residency, "the layout changed without the epoch"
        if residency is Residency.SHARD and (begins or new_attempt):
            self._arrived = {key: [] for key in self._wanted}

    def arrive(self, source: int, target: int, tensor: int, begin: int, end: int) -> None:
        parts = self._arrived[target, source, tensor]
        assert 0 <= begin < end <= self._wanted[target, source, tensor], (source, target, tensor, begin, end)
        assert all(end <= b or e <= begin for b, e in parts), "a head's numbers arrive twice"
        parts.append((begin, end))

    def overwritten(self, rank: int) -> None:
        """A cache row was written where `rank` keeps the other ranks' heads."""
        assert self._residency is Residency.SHARD, f"rank {rank}: a cache row was written over heads in use"
        for key in self._wanted:
            if key[0] == rank:
                self._arrived[key] = []

    def check_complete(self) -> None:
        for key, count in self._wanted.items():
            assert sum(end - begin for begin, end in self._arrived[key]) == count, f"heads are missing: {key}"
