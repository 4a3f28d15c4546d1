"""Decides where the cache of a newly admitted request goes. While a request is queued it belongs to no rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind
from splash_trt.scheduler.slots import Slots

RESERVE_SHARE = 8  # a page is kept free for every 8 running requests, or they would soon preempt what was just admitted

ExpectedOutput = Callable[[np.ndarray], np.ndarray]
"""Tokens of output still to come [R] of requests that have generated [R] so far, whatever their limits."""


def reserve(running_at: np.ndarray) -> int:
    """Pages to keep free on each rank for the requests that run; running_at [N]: how many by home."""
    return -(-int(running_at.sum()) // RESERVE_SHARE)


def output_left(expected: ExpectedOutput, generated: np.ndarray, limit_left: np.ndarray) -> np.ndarray:
    """[R] float64: tokens still to come of requests that have `generated` [R] and may get limit_left [R] more."""
    return np.clip(expected(generated), 0, limit_left)


class RankLoads:
    """The work that each rank has for the requests at home there. It is counted once a step and updated with each
    admission, so that a burst of requests in one step spreads over the ranks. Arrays [N]."""

    def __init__(self, slots: Slots, running_at: np.ndarray, expected: ExpectedOutput) -> None:
        self._slots = slots
        self._tokens: np.ndarray | None = None
        self.requests = running_at.astype(np.float64)
        self._expected = expected

    @property
    def tokens(self) -> np.ndarray:
        """Tokens held or expected, also those of prompts that are not computed yet. Counted when first asked for: with
        replicated caches nobody asks."""
        if self._tokens is None:
            slots, live = self._slots, self._slots.live.nonzero()[0]
            total = slots.total[live]
            left = output_left(self._expected, np.maximum(total - slots.prompt[live], 0), slots.limit[live] - total)
            self._tokens = np.bincount(slots.home[live], total + left, len(self.requests))
        return self._tokens

    def lightest_first(self) -> list[int]:
        """Ranks by their share of all tokens plus their share of all requests; ties go to the lower rank.

        Both count: a decode step reads every token's cache row, and pays for each request besides.
        """
        load = self.tokens / max(self.tokens.sum(), 1) + self.requests / max(self.requests.sum(), 1)
        return np.argsort(load, kind="stable").tolist()

    def add(self, home: int, num_tokens: int, generated: int, limit: int) -> None:
        """A request was admitted: tokens known, of these output, most tokens."""
        if self._tokens is not None:  # else its slot is counted with the others
            left = output_left(self._expected, np.array([generated]), np.array([limit - num_tokens]))
            self._tokens[home] += num_tokens + left[0]
        self.requests[home] += 1


def place(
    directory: Directory,
    kind: PlacementKind,
    num_pages: int,
    final_pages: int,
    loads: RankLoads,
    target_for: Callable[[Placement], Placement | None],
    ranks: np.ndarray | None = None,
) -> tuple[Placement, Placement | None] | None:
    """The placement for a request of num_pages now and final_pages at its longest, and its second one while a switch
    is under way (target_for); None while there is no room.

    Among the ranks with room the owner (OWNED) or home (STRIPED) is the one with the lightest load.
    """
    limits, room = directory.limits(), directory.free_pages() - reserve(loads.requests)
    for home in [0] if kind is PlacementKind.REPLICATED else loads.lightest_first():
        if ranks is not None and home not in ranks:
            continue
        placement = Placement(kind, home)
        target = target_for(placement)
        if kind is PlacementKind.OWNED and target is None:
            fits = num_pages <= room[home] and final_pages <= limits[home]
        else:
            now = directory.needed_by(placement, target, 0, num_pages)
            final = placement.pages_per_rank(final_pages, directory.num_ranks)
            fits = bool(((now <= room) | (now == 0)).all() and (final <= limits).all())
        if fits:
            return placement, target
    return None
