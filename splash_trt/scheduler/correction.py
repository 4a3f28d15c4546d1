"""Corrects the cost model by the steps that a running server observes: by a factor common to all layouts times a factor
of each layout.

The logarithm of observed over predicted time is modelled as a common part plus a part of the layout. Steps with prefill
and steps that only decode are corrected separately, since errors of one say little about the other. Steps that only
decode are corrected at several numbers of tokens: launches dominate a small batch's time, and memory a large one's. An
observation counts most at the numbers nearest to its own; farther away it serves until there are nearer ones.

Both parts are means of observations that fade with time, drawn towards 0 while there are few. So a layout that never
ran follows the common part. In the common part a layout counts by how well it is known, not by how often it ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from splash_trt.config import Layout

MEMORY_STEPS = 200.0  # an observation so many steps ago counts 1 / e of a new one
PRIOR_STEPS = 20.0  # a layout's part is drawn to 0 as if so many observations said 0
COMMON_PRIOR_STEPS = 5.0  # the same for the common part
MAX_RATIO = 5.0  # an observation that differs from the corrected prediction by more is an outlier and ignored,
OUTLIERS_IN_A_ROW = 20  # unless there are so many in a row
CLIP = math.log(1.5)  # an observation counts as differing from the corrected prediction by no more than this
SIZES = (1.0, 4.0, 16.0, 64.0, 256.0)  # the numbers of tokens at which steps that only decode are corrected
APART = 8.0  # an observation counts so many times less at the next of SIZES


@dataclass
class _Mean:
    """The mean of one layout's log ratios, older ones faded."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, counts: float) -> None:
        """Add an observation that counts so much (at most 1)."""
        fade = math.exp(-counts / MEMORY_STEPS)
        self.weight = self.weight * fade + counts
        self.total = self.total * fade + value * counts

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass
class _Mode:
    """The correction of one sort of steps: those with prefill, or those that only decode about so many tokens."""

    means: dict[Layout, _Mean] = field(default_factory=lambda: {layout: _Mean() for layout in Layout})
    parts: dict[Layout, float] = field(default_factory=lambda: dict.fromkeys(Layout, 0.0))
    common: float = 0.0
    factors: dict[Layout, float] = field(default_factory=lambda: dict.fromkeys(Layout, 1.0))
    """What predictions are to be multiplied by."""
    outliers: int = 0

    def log_factor(self, layout: Layout) -> float:
        return self.common + self.parts[layout]

    def observe(self, layout: Layout, ratio: float, counts: float) -> None:
        """Take in a logarithm of observed over predicted time that counts so much."""
        mean, expected = self.means[layout], self.log_factor(layout)
        if abs(ratio - expected) > math.log(MAX_RATIO) and mean.weight:
            self.outliers += 1
            if self.outliers < OUTLIERS_IN_A_ROW:
                return
        else:
            self.outliers = 0
        if mean.weight:
            ratio = min(max(ratio, expected - CLIP), expected + CLIP)
        mean.add(ratio, counts)
        self.refit()

    def refit(self) -> None:
        """The common part is the mean of the layouts' means, weighted with their certainty w / (w + prior), and drawn
        towards 0 at the start. A layout's part is what is left of its mean, drawn towards 0 likewise."""
        sure = {layout: m.weight / (m.weight + PRIOR_STEPS) for layout, m in self.means.items()}
        known = sum(sure.values())
        seen = sum(m.weight for m in self.means.values())
        mean = sum(sure[layout] * m.value for layout, m in self.means.items()) / known
        self.common = mean * seen / (seen + COMMON_PRIOR_STEPS)
        self.parts = {layout: sure[layout] * (m.value - self.common) for layout, m in self.means.items()}
        self.factors = {layout: math.exp(self.log_factor(layout)) for layout in self.parts}


class Correction:
    """Deterministic: the same observations in the same order give the same factors. In the calls, tokens are those of a
    step that only decodes; None for a step with prefill."""

    def __init__(self) -> None:
        self._prefill = _Mode()
        self._decode = [_Mode() for _ in SIZES]
        self._last: Layout | None = None

    def factor(self, layout: Layout, tokens: float | None) -> float:
        """What a prediction is to be multiplied by."""
        if tokens is None:
            return self._prefill.factors[layout]
        place = _place(tokens)
        low = int(place)
        share = place - low
        below = self._decode[low].factors[layout]
        return below if not share else below + share * (self._decode[low + 1].factors[layout] - below)

    def certainty(self, layout: Layout, tokens: float) -> float:
        """From 0 to 1: how well the time of the layout's steps that decode so many tokens is known."""
        weight = self._decode[round(_place(tokens))].means[layout].weight
        return weight / (weight + PRIOR_STEPS)

    def observe(self, layout: Layout, tokens: float | None, predicted_s: float, observed_s: float) -> None:
        """A step took observed_s. The first one under another layout than the last is left out: it begins an epoch."""
        first, self._last = layout is not self._last, layout
        if first or predicted_s <= 0 or observed_s <= 0:
            return
        ratio = math.log(observed_s / predicted_s)
        if tokens is None:
            self._prefill.observe(layout, ratio, 1.0)
            return
        place = _place(tokens)
        for at, mode in enumerate(self._decode):
            mode.observe(layout, ratio, APART ** -abs(place - at))


def _place(tokens: float) -> float:
    """The position of a number of tokens among SIZES, interpolated: 0 at the first."""
    return min(max(math.log(max(tokens, 1.0), SIZES[1]), 0.0), len(SIZES) - 1.0)
