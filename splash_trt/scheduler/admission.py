"""Where a request's cache goes when it gets one. Queued requests belong to no rank yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind

RESERVE_SHARE = 8  # one page kept free for this many running requests, so that they do not evict what just came in


def reserve(running_at: np.ndarray) -> int:
    """Pages to keep free on each rank for the requests that run; running_at [N]: how many by home."""
    return -(-int(running_at.sum()) // RESERVE_SHARE)


def place(
    directory: Directory,
    kind: PlacementKind,
    num_pages: int,
    final_pages: int,
    running_at: np.ndarray,
    target_for: Callable[[Placement], Placement | None],
) -> tuple[Placement, Placement | None] | None:
    """The placement for a request of num_pages now and final_pages at its longest, and its second one while a switch
    is under way (target_for); None while there is no room.

    running_at [N]: running requests by home. OWNED takes the rank with the largest share of its pages free (the most
    free pages would send every request to the rank that has some more of them), STRIPED the home with the fewest
    requests; ties go to the lower rank.
    """
    num_ranks, limits = directory.num_ranks, directory.limits()
    room = directory.free_pages() - reserve(running_at)

    def fits(placement: Placement, target: Placement | None) -> bool:
        now = directory.needed_by(placement, target, 0, num_pages)
        final = placement.pages_per_rank(final_pages, num_ranks)
        return bool((now <= np.where(now > 0, room, now)).all() and (final <= limits).all())

    homes = [0]
    if kind is PlacementKind.OWNED:
        homes = np.argsort(-room / np.maximum(limits, 1), kind="stable").tolist()
    elif kind is PlacementKind.STRIPED:
        homes = np.argsort(running_at, kind="stable").tolist()
    for home in homes:
        placement = Placement(kind, home)
        target = target_for(placement)
        if fits(placement, target):
            return placement, target
    return None
