"""Which physical page holds which page of which request, on every rank: kept by rank 0 and the only truth.

Ranks learn of it through the block-table changes in plans. Pages given back are not reused before every plan that was
sent while they were held has completed everywhere: until then they are "leaving".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from splash_trt.cache.placement import Placement
from splash_trt.cache.pool import PagePool
from splash_trt.plan import NO_PAGE


@dataclass
class Entry:
    """One request's pages: pages[i, n] is the id of page i on rank n, NO_PAGE where rank n does not hold it."""

    placement: Placement
    pages: np.ndarray  # [capacity, N] int32, of which num_pages rows count
    num_pages: int = 0

    @property
    def table(self) -> np.ndarray:
        return self.pages[: self.num_pages]


@dataclass(frozen=True)
class Leaving:
    """Pages of rank `rank` that may be reused once plan `step` has completed."""

    step: int
    rank: int
    pages: tuple[int, ...]


class Directory:
    """Pages of all requests on N ranks; `limits` gives each rank's number of pages."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.pools = [PagePool(limit) for limit in limits]
        self._entries: dict[str, Entry] = {}
        self._leaving: deque[Leaving] = deque()
        self._num_leaving = np.zeros(len(limits), np.int64)

    @property
    def num_ranks(self) -> int:
        return len(self.pools)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __getitem__(self, request_id: str) -> Entry:
        return self._entries[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def free_pages(self) -> np.ndarray:
        """[N] int64: pages that can be allocated now."""
        return np.array([pool.num_free for pool in self.pools])

    def leaving_pages(self) -> np.ndarray:
        """[N] int64: pages that become free when the plans in flight have completed."""
        return self._num_leaving.copy()

    def missing(self, placement: Placement, first_page: int, count: int) -> np.ndarray:
        """[N] int64: how many pages more than are free each rank would need for `count` further pages, 0 or above."""
        need = placement.pages_per_rank(count, self.num_ranks, first_page=first_page)
        return np.maximum(need - self.free_pages(), 0)

    def open(self, request_id: str, placement: Placement) -> None:
        assert request_id not in self._entries, request_id
        self._entries[request_id] = Entry(placement, np.full((4, self.num_ranks), NO_PAGE, np.int32))

    def grow(self, request_id: str, count: int) -> np.ndarray:
        """Add `count` pages to a request; every rank must have room (see missing).

        Returns [C, 3] int32: rank, page index, page id of each page added on each rank.
        """
        entry = self._entries[request_id]
        first, last = entry.num_pages, entry.num_pages + count
        if last > len(entry.pages):
            grown = np.full((max(last, 2 * len(entry.pages)), self.num_ranks), NO_PAGE, np.int32)
            grown[:first] = entry.table
            entry.pages = grown
        held = entry.placement.holders(first, count, self.num_ranks)
        for rank, pool in enumerate(self.pools):
            mine = first + np.flatnonzero(held[:, rank])
            entry.pages[mine, rank] = pool.allocate(len(mine))
        entry.num_pages = last
        index, ranks = np.nonzero(held)
        return np.stack([ranks, first + index, entry.pages[first + index, ranks]], axis=1).astype(np.int32)

    def replace(self, request_id: str, rank: int, page_index: int, page: int, *, step: int) -> None:
        """Point to another physical page, already allocated by the caller; the old one leaves after plan `step`."""
        entry = self._entries[request_id]
        old = int(entry.pages[page_index, rank])
        entry.pages[page_index, rank] = page
        self._leave(rank, (old,), step)

    def close(self, request_id: str, *, step: int) -> None:
        """Forget a request; its pages are free once plan `step`, the last one sent, has completed."""
        entry = self._entries.pop(request_id)
        for rank in range(self.num_ranks):
            ids = entry.table[:, rank]
            self._leave(rank, tuple(ids[ids != NO_PAGE].tolist()), step)

    def _leave(self, rank: int, pages: tuple[int, ...], step: int) -> None:
        if pages:
            self._leaving.append(Leaving(step, rank, pages))
            self._num_leaving[rank] += len(pages)

    def completed(self, step: int) -> None:
        """Plan `step` and all before it have completed on all ranks."""
        while self._leaving and self._leaving[0].step <= step:
            leaving = self._leaving.popleft()
            self.pools[leaving.rank].free(list(leaving.pages))
            self._num_leaving[leaving.rank] -= len(leaving.pages)

    def check(self) -> None:
        """Pools balance, and what they hold is what entries and leaving pages say, each page exactly once."""
        held: list[list[int]] = [[] for _ in self.pools]
        for entry in self._entries.values():
            expected = entry.placement.holders(0, entry.num_pages, self.num_ranks)
            assert np.array_equal(entry.table != NO_PAGE, expected), "pages are not where the placement says"
            for rank in range(self.num_ranks):
                held[rank] += entry.table[expected[:, rank], rank].tolist()
        for leaving in self._leaving:
            held[leaving.rank] += leaving.pages
        for rank, pool in enumerate(self.pools):
            pool.check()
            assert len(held[rank]) == len(set(held[rank])), f"rank {rank}: a page has two users"
            assert len(held[rank]) == pool.num_held, f"rank {rank}: {pool.num_held} held, {len(held[rank])} in use"
