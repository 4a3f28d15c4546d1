"""Empties the top of a rank's pages: which live pages to copy below a limit. A local move, decided on rank 0."""

from __future__ import annotations

import numpy as np

from splash_trt.cache.directory import Directory


def compact(
    directory: Directory, rank: int, limit: int, budget_pages: int, *, step: int
) -> list[tuple[str, int, int, int]]:
    """Move up to budget_pages live pages of `rank` with ids at or above `limit` to free pages below it.

    The directory points to the new pages at once; the old ones leave after plan `step`, the plan that carries the
    copies. Returns (request id, page index, old page, new page), fewer than asked when free pages run out.
    """
    pool = directory.pools[rank]
    moved: list[tuple[str, int, int, int]] = []
    for request_id in sorted(directory):
        column = directory[request_id].table[:, rank]
        for index in np.flatnonzero(column >= limit).tolist():
            if len(moved) == budget_pages:
                return moved
            if not pool.num_free:
                return moved
            page = pool.allocate(1)[0]
            if page >= limit:  # lowest first: no free page below the limit is left
                pool.free([page])
                return moved
            old = int(column[index])
            directory.replace(request_id, rank, index, page, step=step)
            moved.append((request_id, index, old, page))
    return moved
