"""Decides, on rank 0, which live pages a rank copies to below a limit, to empty the top of its pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash_trt.cache.directory import Directory


@dataclass(frozen=True)
class Compacted:
    """Page page_index of a request moves from id `old` to `new` on one rank; in the target table too if `shared`."""

    request_id: str
    page_index: int
    old: int
    new: int
    shared: bool


def compact(directory: Directory, rank: int, limit: int, budget_pages: int, *, step: int) -> list[Compacted]:
    """Move up to budget_pages live pages of `rank` with ids at or above `limit` to free pages below it.

    The directory names the new pages at once; the old ones leave after plan `step`, the plan that carries the copies.
    Stops early when there are no free pages below the limit.
    """
    pool = directory.pools[rank]
    moved: list[Compacted] = []
    for request_id in sorted(directory):
        column = directory[request_id].table[:, rank]
        for index in np.flatnonzero(column >= limit).tolist():
            if len(moved) == budget_pages or not pool.num_free:
                return moved
            page = int(pool.allocate(1)[0])
            if page >= limit:  # pages are allocated lowest first: no free page below the limit is left
                pool.free([page])
                return moved
            old = int(column[index])
            shared = directory.replace(request_id, rank, index, page, step=step)
            moved.append(Compacted(request_id, index, old, page, shared))
    return moved
