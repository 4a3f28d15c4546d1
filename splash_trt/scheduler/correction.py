"""How a running server's steps compare with what was predicted: one factor for all layouts, one for each.

Logarithms of observed over predicted time are split into a common part and a part for each layout, apart for steps with
and without prefill, since what is wrong with prompts tells little of decoding; and for the latter at several numbers of
tokens, since launches make up a small batch's time and memory a large one's. An observation counts most at the numbers
nearest to its own; further away it is what is known until there are nearer ones.

Both parts are sums over observations that fade, drawn towards 0 (the layout's) as long as there are few: a layout that
never ran follows the common part. A layout counts in the common part by how well it is known, not by how often it ran.
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
SIZES = (1.0, 4.0, 16.0, 64.0, 256.0)  # tokens of steps that only decode, at which they are corrected
APART = 8.0  # an observation counts so many times less at the next number of tokens


@dataclass
class _Mean:
    """Of one layout's log ratios, faded."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, counts: float) -> None:
        """An observation that counts so much, at most 1."""
        fade = math.exp(-counts / MEMORY_STEPS)
        self.weight = self.weight * fade + counts
        self.total = self.total * fade + value * counts

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass
class _Mode:
    """Steps with prefill, or without it and of about one size."""

    means: dict[Layout, _Mean] = field(default_factory=lambda: {layout: _Mean() for layout in Layout})
    parts: dict[Layout, float] = field(default_factory=lambda: dict.fromkeys(Layout, 0.0))
    common: float = 0.0
    factors: dict[Layout, float] = field(default_factory=lambda: dict.fromkeys(Layout, 1.0))
    """What predictions are to be multiplied by."""
    outliers: int = 0

    def log_factor(self, layout: Layout) -> float:
        return self.common + self.parts[layout]

    def observe(self, layout: Layout, ratio: float, counts: float) -> None:
        """A logarithm of observed over predicted time."""
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
    """Deterministic: the same observations in the same order give the same factors. tokens: of a step that only
    decodes; None: it has prefill."""

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
        """From 0 to 1: how well it is known what the layout's steps of so many tokens take."""
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
    """Where among SIZES a number of tokens lies: 0 at the first."""
    return min(max(math.log(max(tokens, 1.0), SIZES[1]), 0.0), len(SIZES) - 1.0)
