"""Which physical page holds which page of which request, on every rank: kept by rank 0 and the only truth.

Ranks learn of it through the block-table changes in plans. Pages given back are not reused before every plan that was
sent while they were held has completed everywhere: until then they are "leaving".

While a switch is under way a request has a second placement, its target. A page that both want on a rank is one and
the same there; at the commit the target becomes the placement and what it does not name leaves.
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
    target: Placement | None = None
    target_pages: np.ndarray | None = None  # like pages, while there is a target

    @property
    def table(self) -> np.ndarray:
        return self.pages[: self.num_pages]

    @property
    def target_table(self) -> np.ndarray:
        assert self.target_pages is not None
        return self.target_pages[: self.num_pages]

    def held(self, rank: int) -> set[int]:
        """Every page of `rank` that this request has, under either placement."""
        ids = set(self.table[:, rank].tolist())
        if self.target is not None:
            ids |= set(self.target_table[:, rank].tolist())
        return ids - {NO_PAGE}


@dataclass(frozen=True)
class Leaving:
    """Pages of rank `rank` that may be reused once plan `step` has completed."""

    step: int
    rank: int
    pages: tuple[int, ...]
    highest: int
    """The largest of `pages`."""


@dataclass(frozen=True)
class Added:
    """Pages that a request got. Each [C, 3] int32: rank, page index, page id."""

    tables: np.ndarray
    target_tables: np.ndarray


class Directory:
    """Pages of all requests on N ranks; `limits` gives each rank's number of pages."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.pools = [PagePool(limit) for limit in limits]
        self._entries: dict[str, Entry] = {}
        self._leaving: deque[Leaving] = deque()

    @property
    def num_ranks(self) -> int:
        return len(self.pools)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __getitem__(self, request_id: str) -> Entry:
        return self._entries[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def limits(self) -> np.ndarray:
        """[N] int64: pages of each rank."""
        return np.array([pool.limit for pool in self.pools])

    def free_pages(self) -> np.ndarray:
        """[N] int64: pages that can be allocated now."""
        return np.array([pool.num_free for pool in self.pools])

    def leaving_pages(self) -> np.ndarray:
        """[N] int64: pages below their pool's limit that come free when the plans in flight have completed."""
        return self._leaving_below(self.limits())

    def _leaving_below(self, bounds: np.ndarray) -> np.ndarray:
        """[N] int64: leaving pages of each rank with ids below bounds [N]."""
        total = np.zeros(self.num_ranks, np.int64)
        for leaving in self._leaving:
            bound = int(bounds[leaving.rank])
            whole = leaving.highest < bound
            total[leaving.rank] += len(leaving.pages) if whole else sum(page < bound for page in leaving.pages)
        return total

    def _all_leaving(self) -> np.ndarray:
        """[N] int64: leaving pages of each rank, below the limit or not."""
        total = np.zeros(self.num_ranks, np.int64)
        for leaving in self._leaving:
            total[leaving.rank] += len(leaving.pages)
        return total

    def set_limits(self, limits: Sequence[int], *, step: int = 0) -> None:
        """Bounds of all pools. Pages that a higher limit adds can be had once plan `step` has completed; 0: at once."""
        for rank, (pool, limit) in enumerate(zip(self.pools, limits, strict=True)):
            before = pool.limit
            pool.set_limit(limit)
            if step and limit > before:
                free = pool.allocate(pool.num_free)
                pool.free([page for page in free if page < before])
                self._leave(rank, tuple(page for page in free if page >= before), step)

    def live_pages(self) -> np.ndarray:
        """[N] int64: pages that requests hold, those that are leaving not counted."""
        return np.array([pool.num_held for pool in self.pools]) - self._all_leaving()

    def target_only(self, rank: int) -> bool:
        """Whether some page of `rank` is held for a target alone."""
        for entry in self._entries.values():
            if entry.target is not None:
                wanted = entry.target_table[:, rank]
                if ((wanted != NO_PAGE) & (wanted != entry.table[:, rank])).any():
                    return True
        return False

    def live_above(self) -> np.ndarray:
        """[N] int64: requests' pages at or above their pool's limit."""
        return self.top_held() - (self._all_leaving() - self.leaving_pages())

    def top_held(self) -> np.ndarray:
        """[N] int64: pages held or leaving at or above their pool's limit."""
        return np.array([len(pool.held_from(pool.limit)) for pool in self.pools])

    def needed(self, request_id: str, count: int) -> np.ndarray:
        """[N] int64: pages that `count` further pages of a request take on each rank, under both its placements."""
        entry = self._entries[request_id]
        return self.needed_by(entry.placement, entry.target, entry.num_pages, count)

    def needed_by(self, placement: Placement, target: Placement | None, first_page: int, count: int) -> np.ndarray:
        """[N] int64: the same for pages first_page … first_page + count - 1 of any request."""
        if target is None or target == placement:
            return placement.pages_per_rank(count, self.num_ranks, first_page=first_page)
        here = placement.holders(first_page, count, self.num_ranks)
        return (here | target.holders(first_page, count, self.num_ranks)).sum(axis=0)

    def open(self, request_id: str, placement: Placement, target: Placement | None = None) -> None:
        assert request_id not in self._entries, request_id
        entry = Entry(placement, np.full((4, self.num_ranks), NO_PAGE, np.int32), target=target)
        if target is not None:
            entry.target_pages = entry.pages.copy()
        self._entries[request_id] = entry

    def grow(self, request_id: str, count: int) -> Added:
        """Add `count` pages to a request; every rank must have room (see needed)."""
        entry = self._entries[request_id]
        first, last = entry.num_pages, entry.num_pages + count
        entry.pages = _enlarged(entry.pages, first, last)
        held = entry.placement.holders(first, count, self.num_ranks)
        self._allocate(entry.pages, first, held)
        entry.num_pages = last
        wanted = np.zeros_like(held)
        if entry.target is not None:
            assert entry.target_pages is not None
            entry.target_pages = _enlarged(entry.target_pages, first, last)
            wanted = entry.target.holders(first, count, self.num_ranks)
            self._allocate(entry.target_pages, first, wanted & ~held)
            stays = wanted & held
            entry.target_pages[first:last][stays] = entry.pages[first:last][stays]
        return Added(
            _changes(entry.pages, first, held),
            _changes(entry.pages if entry.target_pages is None else entry.target_pages, first, wanted),
        )

    def retarget(self, request_id: str, target: Placement) -> np.ndarray:
        """Give a request a second placement; pages it lacks there are allocated, so every rank must have room.

        Returns [C, 3] int32: rank, page index, page id of all its target pages.
        """
        entry = self._entries[request_id]
        assert entry.target is None, request_id
        held = entry.placement.holders(0, entry.num_pages, self.num_ranks)
        wanted = target.holders(0, entry.num_pages, self.num_ranks)
        entry.target, entry.target_pages = target, np.full_like(entry.pages, NO_PAGE)
        self._allocate(entry.target_pages, 0, wanted & ~held)
        stays = np.flatnonzero(wanted & held)
        entry.target_table.flat[stays] = entry.table.flat[stays]
        return _changes(entry.target_pages, 0, wanted)

    def commit(self, request_id: str, *, step: int) -> None:
        """The target becomes the placement; other pages leave after plan `step`, the last that names them."""
        self._settle(request_id, keep_target=True, step=step)

    def drop_target(self, request_id: str, *, step: int) -> None:
        """Forget the target; pages that only it wanted leave after plan `step`."""
        self._settle(request_id, keep_target=False, step=step)

    def _settle(self, request_id: str, *, keep_target: bool, step: int) -> None:
        entry = self._entries[request_id]
        assert entry.target is not None and entry.target_pages is not None, request_id
        kept, lost = (entry.target_table, entry.table) if keep_target else (entry.table, entry.target_table)
        gone = (lost != NO_PAGE) & (kept != lost)
        for rank in range(self.num_ranks):
            self._leave(rank, tuple(lost[gone[:, rank], rank].tolist()), step)
        if keep_target:
            entry.placement, entry.pages = entry.target, entry.target_pages
        entry.target = entry.target_pages = None

    def replace(self, request_id: str, rank: int, page_index: int, page: int, *, step: int) -> bool:
        """Point to another physical page, already allocated by the caller; the old one leaves after plan `step`.

        Where the target shared the old page it shares the new one; returns whether it does.
        """
        entry = self._entries[request_id]
        old = int(entry.pages[page_index, rank])
        entry.pages[page_index, rank] = page
        shared = entry.target_pages is not None and int(entry.target_pages[page_index, rank]) == old
        if shared and entry.target_pages is not None:
            entry.target_pages[page_index, rank] = page
        self._leave(rank, (old,), step)
        return shared

    def close(self, request_id: str, *, step: int) -> None:
        """Forget a request; its pages are free once plan `step`, the last one sent, has completed."""
        entry = self._entries.pop(request_id)
        for rank in range(self.num_ranks):
            self._leave(rank, tuple(sorted(entry.held(rank))), step)

    def _allocate(self, pages: np.ndarray, first: int, wanted: np.ndarray) -> None:
        """Fill pages[first + i, n] with a new page of rank n wherever wanted[i, n]."""
        for rank, pool in enumerate(self.pools):
            mine = first + np.flatnonzero(wanted[:, rank])
            pages[mine, rank] = pool.allocate(len(mine))

    def _leave(self, rank: int, pages: tuple[int, ...], step: int) -> None:
        if pages:
            self._leaving.append(Leaving(step, rank, pages, max(pages)))

    def completed(self, step: int) -> None:
        """Plan `step` and all before it have completed on all ranks."""
        while self._leaving and self._leaving[0].step <= step:
            leaving = self._leaving.popleft()
            self.pools[leaving.rank].free(list(leaving.pages))

    def check(self) -> None:
        """Pools balance, and what they hold is what entries and leaving pages say, each page exactly once."""
        held: list[list[int]] = [[] for _ in self.pools]
        for entry in self._entries.values():
            expected = entry.placement.holders(0, entry.num_pages, self.num_ranks)
            assert np.array_equal(entry.table != NO_PAGE, expected), "pages are not where the placement says"
            if entry.target is not None:
                wanted = entry.target.holders(0, entry.num_pages, self.num_ranks)
                assert np.array_equal(entry.target_table != NO_PAGE, wanted), "pages are not where the target says"
                shared = expected & wanted
                assert (entry.table == entry.target_table)[shared].all(), "a page that stays has two copies"
            for rank in range(self.num_ranks):
                held[rank] += entry.held(rank)
        for leaving in self._leaving:
            held[leaving.rank] += leaving.pages
        for rank, pool in enumerate(self.pools):
            pool.check()
            assert len(held[rank]) == len(set(held[rank])), f"rank {rank}: a page has two users"
            assert len(held[rank]) == pool.num_held, f"rank {rank}: {pool.num_held} held, {len(held[rank])} in use"


def _enlarged(pages: np.ndarray, used: int, needed: int) -> np.ndarray:
    if needed <= len(pages):
        return pages
    grown = np.full((max(needed, 2 * len(pages)), pages.shape[1]), NO_PAGE, np.int32)
    grown[:used] = pages[:used]
    return grown


def _changes(pages: np.ndarray, first: int, mask: np.ndarray) -> np.ndarray:
    """[C, 3] int32: rank, page index, page id of pages[first + i, n] wherever mask[i, n]."""
    index, rank = np.nonzero(mask)
    return np.stack([rank, first + index, pages[first + index, rank]], axis=1).astype(np.int32)
