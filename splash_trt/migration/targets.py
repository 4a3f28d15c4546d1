"""Chooses the second placement, the one under the new layout, that each running request gets when a switch begins. Pure
functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind


@dataclass(frozen=True)
class Holding:
    """A running request's cache: its pages now (num_pages) and at its greatest length (final_pages)."""

    request_id: str
    placement: Placement
    num_pages: int
    final_pages: int


def follow(placement: Placement, kind: PlacementKind, home: int) -> Placement:
    """The placement of `kind` that moves least: a request keeps its owner or home; `home` is for one that has none."""
    if kind is PlacementKind.REPLICATED:
        return Placement(kind)
    return Placement(kind, home if placement.kind is PlacementKind.REPLICATED else placement.home)


def choose_targets(
    kind: PlacementKind, holdings: list[Holding], limits: np.ndarray, owners: dict[str, int]
) -> list[Placement]:
    """Second placements in the order of `holdings`. limits [N]: pages of each rank; owners: wishes by request id.

    Requests keep their home or owner, except where a rank that held only a stripe of a request would overflow as its
    owner. The other requests are dealt out, the largest first, each to the rank that is the least full with it; ranks
    that can hold it at its greatest length come before those that cannot, then ranks with room for it now. Ties go to
    the lower rank and the earlier request.
    """
    if kind is PlacementKind.REPLICATED:
        return [Placement(kind) for _ in holdings]
    load = np.zeros(len(limits), np.int64)
    targets: dict[str, Placement] = {}
    free: list[Holding] = []
    for h in holdings:
        home = owners.get(h.request_id)
        if home is None and h.placement.kind is not PlacementKind.REPLICATED:
            home = h.placement.home
        narrows = h.placement.kind is PlacementKind.STRIPED and kind is PlacementKind.OWNED
        if home is None or (narrows and load[home] + h.final_pages > limits[home]):
            free.append(h)
            continue
        targets[h.request_id] = Placement(kind, home)
        load[home] += h.num_pages
    for h in sorted(free, key=lambda h: -h.num_pages):
        then = load + h.num_pages
        share = then / np.maximum(limits, 1)
        overflows, too_long = then > limits, h.final_pages > limits
        if kind is PlacementKind.STRIPED:
            overflows, too_long = np.zeros_like(overflows), np.zeros_like(too_long)  # every rank gets its part anyway
        home = int(np.lexsort((share, overflows, too_long))[0])
        targets[h.request_id] = Placement(kind, home)
        load[home] += h.num_pages
    return [targets[h.request_id] for h in holdings]
