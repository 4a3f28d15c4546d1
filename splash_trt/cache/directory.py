"""Which physical page on which rank holds which page of which request. Kept by rank 0, which alone decides on pages.

Ranks learn of pages through the block-table changes in plans. A page that is no longer needed is "leaving" at first: it
is not reused before every plan that was sent while it was held has completed on all ranks.

While a switch is under way, a request has a second placement, its target. If both placements have a page on the same
rank, they share one physical page. At the commit the target becomes the placement, and pages that it does not have
leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from splash_trt.cache.page_table import NO_TARGET, PageTable
from splash_trt.cache.placement import OWNED, REPLICATED, STRIPED, Placement, holders_of
from splash_trt.cache.pool import PagePool
from splash_trt.plan import NO_PAGE, NO_TABLES

FEW = 4  # up to so many pages are allocated faster one by one


@dataclass
class Entry:
    """One request's pages: [i, n] is the id of page i on rank n, NO_PAGE where rank n does not hold it."""

    placement: Placement
    index: int
    """Stands for the request in calls that take many requests, until it is closed."""
    _tables: PageTable
    target: Placement | None = None

    @property
    def num_pages(self) -> int:
        return int(self._tables.num_pages[self.index])

    @property
    def table(self) -> np.ndarray:
        """[num_pages, N] int32, a copy."""
        return self._tables.pages(self.index)

    @property
    def target_table(self) -> np.ndarray:
        """[num_pages, N] int32, a copy; only while there is a target."""
        assert self.target is not None
        return self._tables.target_pages(self.index)

    def page(self, page_index: int, rank: int) -> int:
        """One entry of `table`."""
        return self._tables.page(self.index, page_index, rank)

    def target_page(self, page_index: int, rank: int) -> int:
        """One entry of `target_table`."""
        return self._tables.target_page(self.index, page_index, rank)

    def held(self, rank: int) -> np.ndarray:
        """The ids of all pages that this request has on `rank` under either placement, each once."""
        pages = self.table[:, rank]
        if self.target is not None:
            pages = np.union1d(pages, self.target_table[:, rank])
        return pages[pages != NO_PAGE]


class Leaving(msgspec.Struct, frozen=True):
    """Pages `pages` [K] of ranks `ranks` [K] that may be reused once plan `step` has completed."""

    step: int
    ranks: np.ndarray
    pages: np.ndarray


class Added(msgspec.Struct, frozen=True):
    """Pages that requests were given. Each [C, 4] int32: rank, position of the request in the call, page index, id."""

    tables: np.ndarray
    target_tables: np.ndarray


class Directory:
    """Pages of all requests on N ranks; `limits` gives each rank's number of pages."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.pools = [PagePool(limit) for limit in limits]
        self._entries: dict[str, Entry] = {}
        self._tables = PageTable(len(limits))
        self._num_targets = 0
        self._leaving: deque[Leaving] = deque()
        self._below: np.ndarray | None = None  # [N] the result of leaving_pages, valid while limits are _below_limits
        self._below_limits = self.limits()

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

    def least_free(self) -> int:
        """The least of free_pages."""
        return min(pool.num_free for pool in self.pools)

    def leaving_pages(self) -> np.ndarray:
        """[N] int64: pages below their pool's limit that become free when the plans in flight have completed."""
        limits = self.limits()
        if self._below is None or (limits != self._below_limits).any():
            self._below, self._below_limits = np.zeros(self.num_ranks, np.int64), limits
            for leaving in self._leaving:
                self._count(leaving)
        return self._below.copy()

    def _count(self, leaving: Leaving) -> None:
        if self._below is not None:
            below = leaving.pages < self._below_limits[leaving.ranks]
            self._below += np.bincount(leaving.ranks[below], minlength=self.num_ranks)

    def _all_leaving(self) -> np.ndarray:
        """[N] int64: leaving pages of each rank, below the limit or not."""
        total = np.zeros(self.num_ranks, np.int64)
        for leaving in self._leaving:
            total += np.bincount(leaving.ranks, minlength=self.num_ranks)
        return total

    def set_limits(self, limits: Sequence[int], *, step: int = 0) -> None:
        """Set all pools' limits. Pages that a higher limit adds are free once plan `step` has completed; 0: at once."""
        for rank, (pool, limit) in enumerate(zip(self.pools, limits, strict=True)):
            before = pool.limit
            pool.set_limit(limit)
            if step and limit > before:
                free = pool.allocate(pool.num_free)
                pool.free(free[free < before])
                added = free[free >= before]
                self._leave(np.full(len(added), rank), added, step)

    def live_pages(self) -> np.ndarray:
        """[N] int64: pages that requests hold, those that are leaving not counted."""
        return np.array([pool.num_held for pool in self.pools]) - self._all_leaving()

    def share_held(self) -> float:
        """The share of all ranks' pages that requests hold: live_pages over limits."""
        live = sum(pool.num_held for pool in self.pools) - sum(len(leaving.pages) for leaving in self._leaving)
        return live / max(1, sum(pool.limit for pool in self.pools))

    def target_only(self, rank: int) -> bool:
        """Whether some page of `rank` is held for a target only."""
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
        """[N] int64: like needed, for pages first_page … first_page + count - 1 of a request with these placements."""
        if target is None or target == placement:
            return placement.pages_per_rank(count, self.num_ranks, first_page=first_page)
        here = placement.holders(first_page, count, self.num_ranks)
        return (here | target.holders(first_page, count, self.num_ranks)).sum(axis=0)

    def open(self, request_id: str, placement: Placement, target: Placement | None = None) -> Entry:
        assert request_id not in self._entries, request_id
        tables = self._tables
        entry = Entry(placement, tables.open(), tables)
        tables.kind[entry.index], tables.home[entry.index] = placement.kind, placement.home
        if target is not None:
            self._aim(entry, target)
        self._entries[request_id] = entry
        return entry

    def _aim(self, entry: Entry, target: Placement | None) -> None:
        self._num_targets += (target is not None) - (entry.target is not None)
        entry.target = target
        self._tables.target_kind[entry.index] = NO_TARGET if target is None else target.kind
        self._tables.target_home[entry.index] = 0 if target is None else target.home

    def grow(self, request_id: str, count: int) -> Added:
        """Add `count` pages to a request; every rank must have room (see needed)."""
        entry = self._entries[request_id]
        index, page = np.full(count, entry.index), entry.num_pages + np.arange(count)
        return self._grow(index, page, *self._holders_of(index, page), np.zeros(count, np.int64))

    def present(self, rank: int, index: np.ndarray) -> np.ndarray:
        """[n] bool: which of the requests `index` [n] have a page on `rank`, by their placements."""
        t = self._tables
        distance = (rank - t.home[index]) % self.num_ranks  # STRIPED: the index of the first page that the rank holds
        distance[t.kind[index] == REPLICATED] = 0
        held = t.num_pages[index] > distance
        held[(t.kind[index] == OWNED) & (distance > 0)] = False
        return held

    def grow_each(self, index: np.ndarray) -> tuple[int, Added]:
        """Add one page to each of the requests `index` [n], in order, until a rank has none left. Returns how many."""
        page = self._tables.num_pages[index]
        if len(index) == 1 and not self._num_targets:
            return self._grow_one(index, page)
        held, wanted = self._holders_of(index, page)
        need = held if wanted is None else held | wanted
        count = len(index)
        if count > self.least_free() and (need.sum(axis=0) > (free := self.free_pages())).any():
            count = int(np.argmin((np.cumsum(need, axis=0) <= free).all(axis=1)))
            index, page, held = index[:count], page[:count], held[:count]
            wanted = None if wanted is None else wanted[:count]
        return count, self._grow(index, page, held, wanted, np.arange(count))

    def _grow_one(self, index: np.ndarray, page: np.ndarray) -> tuple[int, Added]:
        """grow_each for one request without a target, the most frequent case, in half the time."""
        t, n = self._tables, self.num_ranks
        kind, home, number = int(t.kind[index[0]]), int(t.home[index[0]]), int(page[0])
        ranks = range(n) if kind == REPLICATED else [(home + number * (kind == STRIPED)) % n]
        if not all(self.pools[rank].num_free for rank in ranks):
            return 0, Added(NO_TABLES, NO_TABLES)
        added = np.array([(rank, 0, number, self.pools[rank].allocate_one()) for rank in ranks], np.int32)
        pages = np.full((1, n), NO_PAGE, np.int32)
        pages[0, added[:, 0]] = added[:, 3]
        t.append(index, page, pages, None)
        return 1, Added(added, NO_TABLES)

    def _holders_of(self, index: np.ndarray, page: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """[n, N] bool: which ranks hold pages `page` [n] of requests `index` [n], by placement and by target."""
        t = self._tables
        held = holders_of(t.kind[index], t.home[index], page, self.num_ranks)
        if not self._num_targets:
            return held, None
        wanted = holders_of(t.target_kind[index], t.target_home[index], page, self.num_ranks)
        wanted[t.target_kind[index] == NO_TARGET] = False
        return held, wanted

    def _grow(
        self, index: np.ndarray, page: np.ndarray, held: np.ndarray, wanted: np.ndarray | None, which: np.ndarray
    ) -> Added:
        """Allocates pages `page` [n] of requests `index` [n] on their holders; `which` [n] is the request in Added."""
        if not len(index):
            return Added(NO_TABLES, NO_TABLES)
        pages, targets = self._allocate(held), None
        if wanted is not None:
            targets = self._allocate(wanted & ~held)
            stays = wanted & held
            targets[stays] = pages[stays]
        self._tables.append(index, page, pages, targets)
        return Added(_changes(pages, which, page), NO_TABLES if targets is None else _changes(targets, which, page))

    def retarget(self, request_id: str, target: Placement) -> np.ndarray:
        """Give a request a second placement; pages it lacks there are allocated, so every rank must have room.

        Returns [C, 4] int32, as in Added, of all its target pages.
        """
        entry = self._entries[request_id]
        assert entry.target is None, request_id
        held = entry.placement.holders(0, entry.num_pages, self.num_ranks)
        wanted = target.holders(0, entry.num_pages, self.num_ranks)
        self._aim(entry, target)
        pages = self._allocate(wanted & ~held)
        stays = wanted & held
        pages[stays] = entry.table[stays]
        self._tables.set_target_pages(entry.index, pages)
        return _changes(pages, np.zeros(len(pages), np.int64), np.arange(len(pages)))

    def commit(self, request_id: str, *, step: int) -> None:
        """The target becomes the placement; other pages leave after plan `step`, the last that names them."""
        self._settle(request_id, keep_target=True, step=step)

    def drop_target(self, request_id: str, *, step: int) -> None:
        """Forget the target; pages that only it wanted leave after plan `step`."""
        self._settle(request_id, keep_target=False, step=step)

    def _settle(self, request_id: str, *, keep_target: bool, step: int) -> None:
        entry = self._entries[request_id]
        assert entry.target is not None, request_id
        kept, lost = entry.table, entry.target_table
        if keep_target:
            kept, lost = lost, kept
            entry.placement = entry.target
            self._tables.commit(entry.index)
        page_index, ranks = np.nonzero((lost != NO_PAGE) & (kept != lost))
        self._leave(ranks, lost[page_index, ranks], step)
        self._aim(entry, None)

    def replace(self, request_id: str, rank: int, page_index: int, page: int, *, step: int) -> bool:
        """Point to another physical page, already allocated by the caller; the old one leaves after plan `step`.

        Where the target shared the old page it shares the new one; returns whether it does.
        """
        entry = self._entries[request_id]
        old = entry.page(page_index, rank)
        self._tables.set_page(entry.index, page_index, rank, page)
        shared = entry.target is not None and entry.target_page(page_index, rank) == old
        if shared:
            self._tables.set_target_page(entry.index, page_index, rank, page)
        self._leave(np.array([rank]), np.array([old]), step)
        return shared

    def close(self, request_id: str, *, step: int) -> None:
        """Forget a request; its pages are free once plan `step`, the last one sent, has completed."""
        entry = self._entries.pop(request_id)
        pages = entry.table
        if entry.target is not None:
            others = entry.target_table
            pages = np.concatenate([pages, np.where(others == pages, NO_PAGE, others)])
        page_index, ranks = np.nonzero(pages != NO_PAGE)
        self._leave(ranks, pages[page_index, ranks], step)
        self._aim(entry, None)
        self._tables.close(entry.index)

    def _allocate(self, wanted: np.ndarray) -> np.ndarray:
        """[n, N] int32: a new page of rank n wherever wanted[i, n], NO_PAGE elsewhere."""
        if len(wanted) <= FEW:
            return np.array([self._allocate_one(row) for row in wanted.tolist()], np.int32).reshape(wanted.shape)
        pages = np.full(wanted.shape, NO_PAGE, np.int32)
        for rank, count in enumerate(wanted.sum(axis=0).tolist()):
            if count == len(pages):
                pages[:, rank] = self.pools[rank].allocate(count)
            elif count:
                pages[wanted[:, rank], rank] = self.pools[rank].allocate(count)
        return pages

    def _allocate_one(self, wanted: list[bool]) -> list[int]:
        """[N]: _allocate for one page."""
        return [pool.allocate_one() if w else NO_PAGE for pool, w in zip(self.pools, wanted, strict=True)]

    def _leave(self, ranks: np.ndarray, pages: np.ndarray, step: int) -> None:
        if len(pages):
            self._leaving.append(Leaving(step, ranks, pages))
            self._count(self._leaving[-1])

    def completed(self, step: int) -> None:
        """Plan `step` and all before it have completed on all ranks: frees the pages that left after these."""
        done = []
        while self._leaving and self._leaving[0].step <= step:
            done.append(self._leaving.popleft())
        if done:
            self._below = None
            ranks = np.concatenate([leaving.ranks for leaving in done])
            pages = np.concatenate([leaving.pages for leaving in done])
            for rank, count in enumerate(np.bincount(ranks).tolist()):
                if count:
                    self.pools[rank].free(pages[ranks == rank])

    def check(self) -> None:
        """Asserts that pools are consistent, and hold what entries and leaving pages say, each page exactly once."""
        self._tables.check([entry.index for entry in self._entries.values()])
        assert self._num_targets == sum(entry.target is not None for entry in self._entries.values())
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
                held[rank] += entry.held(rank).tolist()
        for leaving in self._leaving:
            for rank, page in zip(leaving.ranks.tolist(), leaving.pages.tolist(), strict=True):
                held[rank].append(page)
        for rank, pool in enumerate(self.pools):
            pool.check()
            assert len(held[rank]) == len(set(held[rank])), f"rank {rank}: a page has two users"
            assert len(held[rank]) == pool.num_held, f"rank {rank}: {pool.num_held} held, {len(held[rank])} in use"


def _changes(pages: np.ndarray, which: np.ndarray, page: np.ndarray) -> np.ndarray:
    """[C, 4] int32, as in Added, of every page id in pages [n, N]."""
    row, rank = np.nonzero(pages != NO_PAGE)
    out = np.empty((len(row), 4), np.int32)
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = rank, which[row], page[row], pages[row, rank]
    return out
