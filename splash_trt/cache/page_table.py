"""The directory's arrays: which pages requests hold. Thousands of requests are given a page in a few numpy calls."""

from __future__ import annotations

import heapq

import numpy as np

from splash_trt.plan import NO_PAGE

NO_TARGET = -1


class PageTable:
    """A request is given the lowest free index. Each of its pages has a row [N] of page ids, NO_PAGE where a rank does
    not hold it, and a second row for the target. H indices, X rows, N ranks.

    kind, home: of the placement; target_kind (NO_TARGET without one), target_home: of the target; num_pages: how many
    pages the request has. All [H] int64.
    """

    def __init__(self, num_ranks: int) -> None:
        self.kind, self.home, self.target_kind, self.target_home, self.num_pages = (np.zeros(0, np.int64),) * 5
        self._row = np.zeros((0, 64), np.int32)  # [H, most pages of a request]: the row of each page
        self._free_indices: list[int] = []  # a heap
        self._pages = np.zeros((0, num_ranks), np.int32)  # [X, N]
        self._target_pages = np.zeros((0, num_ranks), np.int32)  # [X, N], valid while there is a target
        self._free_rows = np.zeros(0, np.int64)  # [X], of which the first num_free_rows are free
        self._num_free_rows = 0

    def open(self) -> int:
        """The index of a new request, which has no pages yet."""
        if not self._free_indices:
            before = len(self.num_pages)
            after = max(64, 2 * before)
            for name in ("kind", "home", "target_kind", "target_home", "num_pages", "_row"):
                setattr(self, name, _longer(getattr(self, name), after))
            self._free_indices = list(range(before, after))
        index = heapq.heappop(self._free_indices)
        self.num_pages[index] = 0
        self.target_kind[index] = NO_TARGET
        return index

    def close(self, index: int) -> None:
        """Forget a request."""
        rows = self.rows(index)
        self._free_rows[self._num_free_rows : self._num_free_rows + len(rows)] = rows
        self._num_free_rows += len(rows)
        heapq.heappush(self._free_indices, index)

    def append(self, index: np.ndarray, page: np.ndarray, pages: np.ndarray, target_pages: np.ndarray | None) -> None:
        """Page `page[i]` of request `index[i]` gets the ids pages[i] and target_pages[i]: [n], [n], [n, N], [n, N].

        Each request's pages are in ascending order and follow the last one it has.
        """
        count, most = len(index), int(page.max()) + 1
        if most > self._row.shape[1]:
            wider = np.zeros((len(self._row), max(most, 2 * self._row.shape[1])), np.int32)
            wider[:, : self._row.shape[1]] = self._row
            self._row = wider
        if count > self._num_free_rows:
            self._add_rows(count)
        self._num_free_rows -= count
        rows = self._free_rows[self._num_free_rows : self._num_free_rows + count]
        self._row[index, page] = rows
        self._pages[rows] = pages
        if target_pages is not None:
            self._target_pages[rows] = target_pages
        self.num_pages[index] = page + 1

    def _add_rows(self, count: int) -> None:
        before = len(self._pages)
        after = max(4096, 2 * before, before + count)
        self._pages, self._target_pages = _longer(self._pages, after), _longer(self._target_pages, after)
        free = self._free_rows[: self._num_free_rows]
        self._free_rows = _longer(np.concatenate([free, np.arange(after - 1, before - 1, -1)]), after)
        self._num_free_rows += after - before

    def rows(self, index: int) -> np.ndarray:
        """[num_pages] int32: a request's rows."""
        return self._row[index, : self.num_pages[index]]

    def pages(self, index: int) -> np.ndarray:
        """[num_pages, N] int32, a copy."""
        return self._pages[self.rows(index)]

    def target_pages(self, index: int) -> np.ndarray:
        """[num_pages, N] int32, a copy; only while there is a target."""
        return self._target_pages[self.rows(index)]

    def page(self, index: int, page: int, rank: int) -> int:
        """One page's id on one rank."""
        return int(self._pages[self._row[index, page], rank])

    def target_page(self, index: int, page: int, rank: int) -> int:
        return int(self._target_pages[self._row[index, page], rank])

    def set_page(self, index: int, page: int, rank: int, page_id: int) -> None:
        self._pages[self._row[index, page], rank] = page_id

    def set_target_page(self, index: int, page: int, rank: int, page_id: int) -> None:
        self._target_pages[self._row[index, page], rank] = page_id

    def set_target_pages(self, index: int, pages: np.ndarray) -> None:
        """pages [num_pages, N]: the page ids under the target."""
        self._target_pages[self.rows(index)] = pages

    def commit(self, index: int) -> None:
        """A request's target becomes its placement."""
        rows = self.rows(index)
        self._pages[rows] = self._target_pages[rows]
        self.kind[index], self.home[index] = self.target_kind[index], self.target_home[index]

    def check(self, indices: list[int]) -> None:
        """Asserts that every row has exactly one user or is free. indices: those in use."""
        used = [self.rows(index) for index in indices]
        rows = np.concatenate([*used, self._free_rows[: self._num_free_rows]])
        assert np.array_equal(np.sort(rows), np.arange(len(self._pages))), "a row has two users, or none"
        assert all((self._pages[rows] != NO_PAGE).any(axis=1).all() for rows in used), "a page that no rank holds"
        assert sorted([*indices, *self._free_indices]) == list(range(len(self.num_pages)))


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    """The array, padded with zeros to `length`."""
    out = np.zeros((length, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out
