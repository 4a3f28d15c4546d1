"""Measures how much a switch slows down the steps in which it moves something, and how long its commit stalls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from splash_trt.layout.switch import Record
from splash_trt.migration.budget import REFERENCE_STEP_S, Comparison
from splash_trt.plan import Plan, StepResult

KEPT = 16  # times of still steps that are remembered: few, since steps get longer as contexts grow
STILL_EVERY, FIRST_STILL = 8, 4  # one in 8 steps of a switch that could move something does not: the 4th, the 12th, …
AROUND = 3  # a still step is compared with so many steps before it and so many after it,
LEAST_AROUND = 2  # of which at least so many on each side must be of its kind and move something
EVERY = 4  # one in 4 steps outside switches is measured, where its expected time has to be computed for that


class _Step(NamedTuple):
    kind: tuple[int, int]
    time: float
    """Seconds; or, where the expected seconds are known, their multiple."""
    num_bytes: float
    """As in Comparison."""


class Meter:
    """Compares steps that move something with steps of the same kind that move nothing ("still" steps).

    Steps differ among themselves by more than the slowdown that is measured here, so only steps of one kind are
    compared: those of one layout and about one size. Once `expect` has told what each plan should take, a step's time
    is divided by that, and a kind is one layout, with or without prompts.

    For the budget, one step of a switch in STILL_EVERY moves nothing (m m m . m m m m m m m . m m m m …), and is
    compared only with the AROUND steps before it and the AROUND steps after it. As these lie evenly around it, slow
    changes cancel, such as contexts that grow. And what a switch costs besides the bytes of the budget (rows that are
    written twice, new rows that are copied) is in both. In a comparison with steps from before the switch, both would
    look like a cost of the bytes.
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
        """Whether this plan, which could move something, should be a still one. To be asked once for each such plan."""
        self._asked += 1
        return self._asked % STILL_EVERY == FIRST_STILL

    def commit(self, step: int, record: Record) -> None:
        """Plan `step` will be the first one in the new layout; the record's stall is measured by the gap before it."""
        self._commit = (step, record)

    def step(self, plan: Plan, result: StepResult, num_bytes: int) -> Comparison | None:
        """Take in a completed step; num_bytes: what its busiest rank moved in the background. Returns a comparison if
        the step that is AROUND steps back was a still one and can be compared now."""
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
        """The comparison of the step in the middle of the latest ones with those around it, if it is a still one and
        enough of them are of its kind and moved something."""
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
        """The plan's kind; only steps of one kind are compared."""
        if self._expected is not None:
            return int(plan.layout), int(plan.only_decodes)
        return int(plan.layout), plan.num_tokens.bit_length()

    def slowdown(self) -> float | None:
        """Median over this switch's moving steps of time / median time of still steps of their kind, less 1; None if
        there are none."""
        return median(self._ratios) - 1 if self._ratios else None
