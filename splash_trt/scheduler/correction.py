"""How a running server's steps compare with what was predicted: one factor for all layouts, one for each.

Logarithms of observed over predicted time are split into a common part and a part for each layout, apart for steps with
and without prefill, since what is wrong with prompts tells little of decoding. Both parts are sums over observations
that fade, drawn towards 0 (the layout's) as long as there are few: a layout that never ran follows the common part. A
layout counts in the common part by how well it is known, not by how often it ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from splash_trt.config import Layout

MEMORY_STEPS = 200.0  # an observation so many steps ago counts 1 / e of a new one
PRIOR_STEPS = 20.0  # a layout's part is drawn to 0 as if so many observations said so
COMMON_PRIOR_STEPS = 5.0
MAX_RATIO = 5.0  # beyond it, against what is expected by now, an observation says something of the machine, not of us
OUTLIERS_IN_A_ROW = 20  # so many are no outliers
CLIP = math.log(1.5)  # what one observation can differ from what is expected, as far as it counts

_FADE = math.exp(-1 / MEMORY_STEPS)


@dataclass
class _Mean:
    """Of one layout's log ratios, faded."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * _FADE + 1
        self.total = self.total * _FADE + value

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass
class _Mode:
    """Steps with prefill, or without."""

    means: dict[Layout, _Mean] = field(default_factory=lambda: {layout: _Mean() for layout in Layout})
    parts: dict[Layout, float] = field(default_factory=lambda: dict.fromkeys(Layout, 0.0))
    common: float = 0.0
    factors: dict[Layout, float] = field(default_factory=lambda: dict.fromkeys(Layout, 1.0))
    """What predictions are to be multiplied by."""
    outliers: int = 0

    def log_factor(self, layout: Layout) -> float:
        return self.common + self.parts[layout]

    def refit(self) -> None:
        """The common part: the mean of the layouts' means, each by its certainty w / (w + prior), drawn to 0 at the
        start. A layout's part: what is left of its mean, drawn to 0 likewise."""
        sure = {layout: m.weight / (m.weight + PRIOR_STEPS) for layout, m in self.means.items()}
        known = sum(sure.values())
        seen = sum(m.weight for m in self.means.values())
        mean = sum(sure[layout] * m.value for layout, m in self.means.items()) / known
        self.common = mean * seen / (seen + COMMON_PRIOR_STEPS)
        self.parts = {layout: sure[layout] * (m.value - self.common) for layout, m in self.means.items()}
        self.factors = {layout: math.exp(self.log_factor(layout)) for layout in self.parts}


class Correction:
    """Deterministic: the same observations in the same order give the same factors."""

    def __init__(self) -> None:
        self._modes = {False: _Mode(), True: _Mode()}
        self._last: Layout | None = None

    def factor(self, layout: Layout, prefill: bool) -> float:
        """What a prediction is to be multiplied by."""
        return self._modes[prefill].factors[layout]

    def observe(self, layout: Layout, prefill: bool, predicted_s: float, observed_s: float) -> None:
        """A step took observed_s. The first one under another layout than the last is left out: it begins an epoch."""
        first, self._last = layout is not self._last, layout
        if first or predicted_s <= 0 or observed_s <= 0:
            return
        mode = self._modes[prefill]
        ratio = math.log(observed_s / predicted_s)
        expected = mode.log_factor(layout)
        if abs(ratio - expected) > math.log(MAX_RATIO) and mode.means[layout].weight:
            mode.outliers += 1
            if mode.outliers < OUTLIERS_IN_A_ROW:
                return
        else:
            mode.outliers = 0
        if mode.means[layout].weight:
            ratio = min(max(ratio, expected - CLIP), expected + CLIP)
        mode.means[layout].add(ratio)
        mode.refit()
