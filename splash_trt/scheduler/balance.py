"""Which requests should change their owners when ranks have drifted apart. Pure functions. R requests, N ranks."""

from __future__ import annotations

import numpy as np

MAX_MOVES = 64
EVEN = 0.05  # of the mean: ranks that differ by less are as good as even


def rebalanced(weight: np.ndarray, home: np.ndarray, num_ranks: int) -> np.ndarray:
    """[R] new owners, few of them changed, so that the heaviest rank is lighter. weight [R]: what a request adds to
    its owner's step.

    Again and again the heaviest rank gives the lightest one a request: the largest that is no more than half of their
    difference, or else the smallest that makes the heavier of the two lighter.
    """
    home = home.copy()
    load = np.bincount(home, weight, num_ranks)
    for _ in range(min(MAX_MOVES, len(weight))):
        heavy, light = int(load.argmax()), int(load.argmin())
        gap = load[heavy] - load[light]
        if gap <= EVEN * max(float(load.mean()), 1e-12):
            break
        candidates = np.flatnonzero(home == heavy)
        mine = weight[candidates]
        small = mine <= gap / 2
        best = int(candidates[np.where(small, mine, -1.0).argmax() if small.any() else mine.argmin()])
        if not 0 < weight[best] < gap:
            break
        home[best] = light
        load[heavy] -= weight[best]
        load[light] += weight[best]
    return home
