"""Measures what a switch costs the steps it runs in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from splash_trt.layout.switch import Record
from splash_trt.plan import Plan, StepResult

KEPT = 16  # few, so that they are recent: contexts grow, and steps with them
PLAIN_EVERY = 16  # of a switch's steps that could move something, one does not, to hold the others against
EVERY = 4  # of the steps that move nothing are looked at where their expected time has to be computed


class Meter:
    """Steps that move something are held against like steps that move nothing.

    Like are steps of one layout and about one size, or, once `expect` was told what a plan should take, of one layout
    with or without prompts, each by its time over what it should have taken: steps differ by more than what is measured
    here.
    """

    def __init__(self) -> None:
        self._expected: Callable[[Plan], float] | None = None
        self._plain: dict[tuple[int, int], deque[float]] = {}
        self._ratios: list[float] = []
        self._gaps: deque[float] = deque(maxlen=KEPT)
        self._commit: tuple[int, Record] | None = None
        self._moving = 0
        self.step_s = 0.0
        """What the latest step that computed something took."""

    def expect(self, step_s: Callable[[Plan], float]) -> None:
        """step_s gives the seconds that a plan's rows should take."""
        self._expected = step_s

    def begin(self) -> None:
        """A switch begins."""
        self._ratios.clear()
        self._moving = 0

    def wants_plain(self) -> bool:
        """Asked for each plan that could move something: this one shall not.

        Without such steps, a long switch would be judged by steps from before it, whose contexts were shorter: it
        would look ever slower, move ever less and last ever longer.
        """
        self._moving = (self._moving + 1) % PLAIN_EVERY
        return self._moving == 0

    def commit(self, step: int, record: Record) -> None:
        """Plan `step` will be the first of the new layout; its gap is the record's stall."""
        self._commit = (step, record)

    def step(self, plan: Plan, result: StepResult, moved: bool) -> float | None:
        """A completed step. If it moved something: its time over that of like steps that did not, where known."""
        gap = max(status.gap_s for status in result.statuses) if result.statuses else None
        if self._commit is not None and plan.step >= self._commit[0]:
            if gap is not None and self._gaps and plan.step == self._commit[0]:
                self._commit[1].stall_s = max(0.0, gap - median(self._gaps))
            self._commit = None
        elif gap is not None and plan.num_tokens:
            self._gaps.append(gap)
        if not plan.num_tokens:
            return None
        self.step_s = result.seconds
        if self._expected is not None and not moved and plan.step % EVERY:
            return None
        time = result.seconds / (self._expected(plan) if self._expected is not None else 1.0)
        times = self._plain.setdefault(self._kind(plan), deque(maxlen=KEPT))
        if not moved:
            times.append(time)
        elif times and (plain := median(times)) > 0:
            self._ratios.append(time / plain)
            return self._ratios[-1]
        return None

    def _kind(self, plan: Plan) -> tuple[int, int]:
        """Plans of one kind are alike."""
        if self._expected is not None:
            return int(plan.layout), int(plan.only_decodes)
        return int(plan.layout), plan.num_tokens.bit_length()

    def slowdown(self) -> float | None:
        """Median over this switch's moving steps of time / median time of like steps, less 1; None if unknown."""
        return median(self._ratios) - 1 if self._ratios else None
