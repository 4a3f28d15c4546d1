"""Estimates what a switch of layouts would move: bytes between ranks, pages inside ranks, steps. Pure functions.

These are the rules of migration/diff.py applied to sums instead of single pages; tests compare the two. N ranks.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency
from splash_trt.migration.diff import Sizes
from splash_trt.scheduler.meter import FIRST_STILL, STILL_EVERY

FEW_STEPS = 4  # that a switch takes besides those that move something: ranks are told, acknowledge, commit


class Traffic(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Bytes [N] that each rank sends and receives."""

    sent: np.ndarray
    received: np.ndarray

    @property
    def busiest(self) -> float:
        """The most that a rank sends or receives. It bounds the number of steps, as a budget counts each way apart."""
        return float(np.maximum.reduce(np.maximum(self.sent, self.received)))

    @property
    def both_ways(self) -> float:
        """The most that a rank sends and receives together."""
        return float(np.maximum.reduce(self.sent + self.received))


def row_traffic(source: PlacementKind, target: PlacementKind, rows: np.ndarray, row_bytes: int) -> Traffic:
    """Traffic of cache rows when their placement changes and no request changes its home. rows [N]: number of cache
    rows by their request's owner or home."""
    n = len(rows)
    if source is target or source is PlacementKind.REPLICATED:
        return Traffic(sent=np.zeros(n), received=np.zeros(n))
    total = rows.sum()
    if source is PlacementKind.OWNED and target is PlacementKind.REPLICATED:
        sent, received = rows * (n - 1.0), total - rows
    elif source is PlacementKind.OWNED:
        sent, received = rows * (n - 1) / n, (total - rows) / n
    elif target is PlacementKind.OWNED:
        sent, received = (total - rows) / n, rows * (n - 1) / n
    else:  # a stripe is one page in N, evenly
        sent = received = np.full(n, total * (n - 1) / n)
    return Traffic(sent=sent * row_bytes, received=received * row_bytes)


def weight_traffic(source: Residency, target: Residency, sizes: Sizes) -> Traffic:
    """Traffic of head-cut weights: going to FULL, every rank gets the other ranks' heads; else nothing moves."""
    own = sizes.head_bytes
    if source is target or target is Residency.SHARD:
        return Traffic(sent=np.zeros(len(own)), received=np.zeros(len(own)))
    return Traffic(sent=own * (len(own) - 1), received=own.sum() - own)


def traffic(source: Layout, target: Layout, rows: np.ndarray, sizes: Sizes) -> Traffic:
    """Cache rows and weights together; rows [N] by owner or home."""
    here, there = SPECS[source], SPECS[target]
    cache = row_traffic(here.placement, there.placement, rows, sizes.row_bytes)
    if here.residency is there.residency:
        return cache
    heads = weight_traffic(here.residency, there.residency, sizes)
    return Traffic(sent=cache.sent + heads.sent, received=cache.received + heads.received)


def owner_traffic(rows: np.ndarray, home: np.ndarray, new_home: np.ndarray, num_ranks: int, row_bytes: int) -> Traffic:
    """Traffic of requests that change their owner: rows, home, new_home [R]."""
    moved = home != new_home
    sent = np.bincount(home[moved], rows[moved] * row_bytes, num_ranks)
    received = np.bincount(new_home[moved], rows[moved] * row_bytes, num_ranks)
    return Traffic(sent=sent, received=received)


def compacted_pages(source: Layout, target: Layout, held_pages: np.ndarray, sizes: Sizes) -> int:
    """About how many pages the fullest rank has to copy away from the top of the arena before heads can come there."""
    here, there = SPECS[source], SPECS[target]
    if here.residency is there.residency or there.residency is Residency.SHARD:
        return 0
    before, after = (np.array(sizes.pages[residency]) for residency in (here.residency, there.residency))
    # Pages are allocated lowest first, but after many requests they may lie anywhere: assume an even spread.
    return int(np.ceil(held_pages * (before - after) / np.maximum(before, 1)).max())


def pages_meanwhile(source: Layout, target: Layout, pages: np.ndarray) -> np.ndarray:
    """[N] pages that each rank holds during the switch, when pages lie where either layout wants them, each page once
    on a rank. pages [N]: by owner or home."""
    kinds = {SPECS[source].placement, SPECS[target].placement}
    if PlacementKind.REPLICATED in kinds:
        return np.full(len(pages), pages.sum())
    return pages if len(kinds) == 1 else pages + (pages.sum() - pages) / len(pages)


def needs_way_station(source: Layout, target: Layout, used_pages: np.ndarray, sizes: Sizes) -> bool:
    """Whether the switch has to go by way of DOP: replicated cache leaves no room for the heads that come in, and in
    DOP each request keeps only one copy. used_pages [N]: pages that are held or reserved for running requests."""
    here, there = SPECS[source], SPECS[target]
    if here.placement is not PlacementKind.REPLICATED or there.residency is not Residency.FULL:
        return False
    return bool((used_pages > np.array(sizes.pages[Residency.FULL])).any())


def steps_for(num_bytes: float, budget_bytes: int) -> int:
    """How many steps the busiest rank takes to send or receive num_bytes, still steps included (see meter.py)."""
    moving = math.ceil(num_bytes / max(budget_bytes, 1))
    return moving + (moving + STILL_EVERY - FIRST_STILL - 1) // (STILL_EVERY - 1)
