"""The free and held pages of one rank, by id; cache/storage.py has their contents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GONE, FREE, HELD = 0, 1, 2  # a page's state; GONE: at or above the limit and not held


class PagePool:
    """Page ids 0 … limit - 1 of one rank, allocated lowest first, so that the top of the arena empties by itself.

    The limit is lowered when the other ranks' heads need the top of the arena, and raised when they are dropped. A held
    page at or above the limit stays held until it is freed (a switch moves it first), and then cannot be allocated.
    """

    def __init__(self, limit: int) -> None:
        self._states = np.full(limit, FREE, np.uint8)
        self._lowest = 0  # no page below this id is free
        self.limit = limit
        self.num_free = limit
        self.num_held = 0

    def held_from(self, page: int) -> list[int]:
        """Held pages with ids at or above `page`, ascending."""
        return (np.flatnonzero(self._states[page:] == HELD) + page).tolist()

    def allocate(self, count: int) -> np.ndarray:
        """[count] int64: the lowest free pages, ascending; the caller has checked num_free."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        width = 2 * count + 64
        while len(found := (self._states[self._lowest : self._lowest + width] == FREE).nonzero()[0]) < count:
            width *= 4
        pages = found[:count] + self._lowest
        self._states[pages] = HELD
        if count:
            self._lowest = int(pages[-1]) + 1
        self.num_free -= count
        self.num_held += count
        return pages

    def allocate_one(self) -> int:
        """The lowest free page; the caller has checked num_free. A few times as fast as `allocate` of 1."""
        assert self.num_free > 0
        begin, width = self._lowest, 64
        while (place := self._states[begin : begin + width].tobytes().find(FREE)) < 0:
            width *= 4
        page = begin + place
        self._states[page] = HELD
        self._lowest = page + 1
        self.num_free -= 1
        self.num_held += 1
        return page

    def free(self, pages: Sequence[int] | np.ndarray) -> None:
        """Give back pages, each of which is held and is named once."""
        ids = np.asarray(pages, np.int64)
        if len(ids) == 0:
            return
        states = self._states[ids]
        assert np.count_nonzero(states == HELD) == len(ids), f"freed, but not held: {ids[states != HELD]}"
        below = ids < self.limit
        count = int(np.count_nonzero(below))
        self._states[ids] = FREE if count == len(ids) else np.where(below, FREE, GONE)
        self._lowest = min(self._lowest, int(np.minimum.reduce(ids)))
        self.num_free += count
        self.num_held -= len(ids)

    def set_limit(self, limit: int) -> None:
        """Lower the limit (free pages above it are gone at once) or raise it (new pages are free)."""
        if limit > len(self._states):
            self._states = np.append(self._states, np.full(limit - len(self._states), GONE, np.uint8))
        low, high = sorted((limit, self.limit))
        part = self._states[low:high]
        part[part != HELD] = FREE if limit > self.limit else GONE
        self.limit = limit
        self.num_free = int(np.count_nonzero(self._states == FREE))
        self._lowest = 0

    def check(self) -> None:
        """Asserts that every page below the limit is free or held, none above it is free, and the counts are right."""
        below, above = self._states[: self.limit], self._states[self.limit :]
        assert (below != GONE).all(), f"{np.count_nonzero(below == GONE)} pages are neither free nor held"
        assert (above != FREE).all(), f"{np.count_nonzero(above == FREE)} pages at or above the limit are free"
        assert not (self._states[: self._lowest] == FREE).any(), "a page is free below the lowest free one"
        counts = np.bincount(self._states, minlength=3)
        assert counts[FREE] == self.num_free and counts[HELD] == self.num_held, (counts, self.num_free, self.num_held)
