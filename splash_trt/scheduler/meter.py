"""Measures what a switch costs the steps it runs in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from splash_trt.layout.switch import Record
from splash_trt.migration.budget import REFERENCE_STEP_S, Comparison
from splash_trt.plan import Plan, StepResult

KEPT = 16  # few, so that they are recent: contexts grow, and steps with them
STILL_EVERY, FIRST_STILL = 8, 4  # of a switch's steps that could move something, one does not, to hold others against
AROUND = 3  # steps on each side of it that it is compared with
LEAST_AROUND = 2  # of them, that are like it
EVERY = 4  # of the steps without a switch are looked at where their expected time has to be computed


class _Step(NamedTuple):
    kind: tuple[int, int]
    time: float
    """Seconds, or over those expected."""
    num_bytes: float
    """As in Comparison."""


class Meter:
    """Steps that move something are held against like steps that move nothing.

    Like are steps of one layout and about one size, or, once `expect` was told what a plan should take, of one layout
    with or without prompts, each by its time over what it should have taken: steps differ by more than what is measured
    here.

    For the budget, one step of a switch in STILL_EVERY moves nothing (m m m . m m m m m m m . m m m m …) and is
    compared with its next AROUND on both sides alone. As they lie evenly around it, slow changes cancel, such as
    contexts that grow; and what a switch costs however little moves, rows that are written twice and new rows that are
    copied, is in both. Held against steps of before the switch, either would look like a cost of the bytes.
    """

    def __init__(self) -> None:
        self._expected: Callable[[Plan], float] | None = None
        self._still: dict[tuple[int, int], deque[float]] = {}
        self._ratios: list[float] = []
        self._latest: deque[_Step] = deque(maxlen=2 * AROUND + 1)  # of the switch under way
        self._gaps: deque[float] = deque(maxlen=KEPT)
        self._commit: tuple[int, Record] | None = None
        self._asked = 0
        self.step_s = 0.0
        """What the latest step that computed something took."""

    def expect(self, step_s: Callable[[Plan], float]) -> None:
        """step_s gives the seconds that a plan's rows should take."""
        self._expected = step_s

    def begin(self) -> None:
        """A switch begins."""
        self._ratios.clear()
        self._latest.clear()
        self._asked = 0

    def wants_still(self) -> bool:
        """Asked for each plan that could move something: this one shall not."""
        self._asked += 1
        return self._asked % STILL_EVERY == FIRST_STILL

    def commit(self, step: int, record: Record) -> None:
        """Plan `step` will be the first of the new layout; its gap is the record's stall."""
        self._commit = (step, record)

    def step(self, plan: Plan, result: StepResult, num_bytes: int) -> Comparison | None:
        """A completed step that moved num_bytes beside its rows, on the rank that moved most. With it, the step AROUND
        before it may have become comparable."""
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
        if self._expected is not None and not plan.attempt and not num_bytes and plan.step % EVERY:
            return None
        time = result.seconds / (self._expected(plan) if self._expected is not None else 1.0)
        kind = self._kind(plan)
        times = self._still.setdefault(kind, deque(maxlen=KEPT))
        if not num_bytes:
            times.append(time)
        elif times and (still := median(times)) > 0:
            self._ratios.append(time / still)
        if not plan.attempt:
            return None
        self._latest.append(_Step(kind, time, num_bytes / max(1.0, result.seconds / REFERENCE_STEP_S)))
        return self._compared()

    def _compared(self) -> Comparison | None:
        """The step in the middle of the latest, if it is a still one among like ones that moved something."""
        if len(self._latest) <= 2 * AROUND or self._latest[AROUND].num_bytes or self._latest[AROUND].time <= 0:
            return None
        still, around = self._latest[AROUND], list(self._latest)
        moving = [step.num_bytes > 0 and step.kind == still.kind for step in around]
        if min(sum(moving[:AROUND]), sum(moving[AROUND:])) < LEAST_AROUND:
            return None
        times = [step.time / still.time for step, moves in zip(around, moving, strict=True) if moves]
        middle = median(times)
        spread = 1.4826 * median(abs(time - middle) for time in times)  # standard deviation, if they are normal
        num_bytes = median(step.num_bytes for step, moves in zip(around, moving, strict=True) if moves)
        return Comparison(middle - 1, num_bytes, spread * math.sqrt(1 + math.pi / 2 / len(times)))

    def _kind(self, plan: Plan) -> tuple[int, int]:
        """Plans of one kind are alike."""
        if self._expected is not None:
            return int(plan.layout), int(plan.only_decodes)
        return int(plan.layout), plan.num_tokens.bit_length()

    def slowdown(self) -> float | None:
        """Median over this switch's moving steps of time / median time of like still steps, less 1; None if unknown."""
        return median(self._ratios) - 1 if self._ratios else None
