"""Measures what a switch costs the steps it runs in."""

from __future__ import annotations

from collections import deque
from statistics import median

from splash_trt.layout.switch import Record
from splash_trt.plan import Plan, StepResult

KEPT = 64


class Meter:
    """Step times of plans that move nothing, by (layout, size), are what plans that move something are held against."""

    def __init__(self) -> None:
        self._plain: dict[tuple[int, int], deque[float]] = {}
        self._ratios: list[float] = []
        self._gaps: deque[float] = deque(maxlen=KEPT)
        self._commit: tuple[int, Record] | None = None
        self.step_s = 0.0
        """What the latest step that computed something took."""

    def begin(self) -> None:
        """A switch begins."""
        self._ratios.clear()

    def commit(self, step: int, record: Record) -> None:
        """Plan `step` will be the first of the new layout; its gap is the record's stall."""
        self._commit = (step, record)

    def step(self, plan: Plan, result: StepResult, moved: bool) -> float | None:
        """A completed step. If it moved something: its time over that of like steps that did not, where known."""
        gap = max((status.gap_s for status in result.statuses), default=None)
        if self._commit is not None and plan.step >= self._commit[0]:
            if gap is not None and self._gaps and plan.step == self._commit[0]:
                self._commit[1].stall_s = max(0.0, gap - median(self._gaps))
            self._commit = None
        elif gap is not None and plan.num_tokens:
            self._gaps.append(gap)
        if not plan.num_tokens:
            return None
        self.step_s = result.seconds
        times = self._plain.setdefault((int(plan.layout), plan.num_tokens.bit_length()), deque(maxlen=KEPT))
        if not moved:
            times.append(result.seconds)
        elif times and (plain := median(times)) > 0:
            self._ratios.append(result.seconds / plain)
            return self._ratios[-1]
        return None

    def slowdown(self) -> float | None:
        """Median over this switch's moving steps of time / median time of like steps, less 1; None if unknown."""
        return median(self._ratios) - 1 if self._ratios else None
