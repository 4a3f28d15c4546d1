"""Where a request's cache goes when it gets one. Queued requests belong to no rank yet."""

from __future__ import annotations

import numpy as np

from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind

RESERVE_SHARE = 8  # one page kept free for this many running requests, so that they do not evict what just came in


def place(
    directory: Directory, kind: PlacementKind, num_pages: int, final_pages: int, running_at: np.ndarray
) -> Placement | None:
    """The placement for a request of num_pages now and final_pages at its longest, or None while there is no room.

    running_at [N]: running requests by home. OWNED takes the rank with the largest share of its pages free (the most
    free pages would send every request to the rank that has some more of them), STRIPED the home with the fewest
    requests; ties go to the lower rank.
    """
    num_ranks = directory.num_ranks
    limits = np.array([pool.limit for pool in directory.pools])
    room = directory.free_pages() - -(-running_at.sum() // RESERVE_SHARE)
    if running_at.sum() == 0:
        room = directory.free_pages()

    def fits(home: int) -> bool:
        placement = Placement(kind, home)
        now = placement.pages_per_rank(num_pages, num_ranks)
        final = placement.pages_per_rank(final_pages, num_ranks)
        return bool((now <= np.where(now > 0, room, now)).all() and (final <= limits).all())

    homes = [0]
    if kind is PlacementKind.OWNED:
        homes = np.argsort(-room / np.maximum(limits, 1), kind="stable").tolist()
    elif kind is PlacementKind.STRIPED:
        homes = np.argsort(running_at, kind="stable").tolist()
    home = next((h for h in homes if fits(h)), None)
    return None if home is None else Placement(kind, home)
