"""The free and held pages of one rank. Knows ids only; what lies in a page is the storage's business."""

from __future__ import annotations

import heapq


class PagePool:
    """Page ids 0 … limit - 1 of one rank, given out lowest first so that the top of the arena empties by itself.

    The limit falls when the other ranks' weights need the top of the arena, and rises when they leave. A held page at
    or above the limit stays held (the switch moves it first); when freed it does not come back.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = list(range(limit))  # sorted, hence a heap
        self._held: set[int] = set()

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def held_from(self, page: int) -> list[int]:
        """Held pages with ids at or above `page`, ascending."""
        return sorted(p for p in self._held if p >= page)

    def allocate(self, count: int) -> list[int]:
        """The `count` lowest free pages; the caller has checked num_free."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        for page in pages:
            self._held.remove(page)  # KeyError: freed twice, a bug
            if page < self._limit:
                heapq.heappush(self._free, page)

    def set_limit(self, limit: int) -> None:
        """Lower the limit (free pages above it are gone at once) or raise it (new pages are free)."""
        if limit < self._limit:
            self._free = [p for p in self._free if p < limit]
        else:
            self._free += [p for p in range(self._limit, limit) if p not in self._held]
        heapq.heapify(self._free)
        self._limit = limit

    def check(self) -> None:
        """Free and held pages are disjoint and together are all there are below the limit."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._held, f"free and held at once: {sorted(free & self._held)}"
        below = free | {p for p in self._held if p < self._limit}
        assert below == set(range(self._limit)), f"{self._limit - len(below)} pages are neither free nor held"
