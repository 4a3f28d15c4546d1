"""What a switch costs the steps it runs in: slowdown against like steps without moves, and the stall at its commit."""

from __future__ import annotations

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.layout.switch import Record
from splash_trt.plan import Plan, RankStatus, StepResult
from splash_trt.scheduler.meter import Meter


def plan(step: int, tokens: int = 4, layout: Layout = Layout.TP) -> Plan:
    ints = np.zeros(tokens, np.int32)
    return Plan(
        step=step,
        epoch=0,
        layout=layout,
        slot=ints,
        start=ints,
        count=np.ones(tokens, np.int32),
        home=ints,
        absorbed=np.ones(tokens, np.bool_),
        token=np.zeros(tokens, np.int64),
        want_index=ints[:0],
        want_target=np.zeros(0, np.int64),
        counts=np.array([tokens], np.int32),
        bucket=tokens,
    )


def result(step: int, seconds: float = 1.0, gaps: tuple[float, ...] = ()) -> StepResult:
    empty = StepResult.empty(step)
    return StepResult(
        step=step,
        token=empty.token,
        logprob=empty.logprob,
        top_token=empty.top_token,
        top_logprob=empty.top_logprob,
        seconds=seconds,
        statuses=tuple(RankStatus("", gap) for gap in gaps),
    )


def record() -> Record:
    return Record(number=1, source="tp", target="dp", why="test", begin_step=0)


def test_slowdown_is_the_median_ratio_to_like_steps() -> None:
    meter = Meter()
    for step, seconds in enumerate((1.0, 1.0, 5.0)):
        meter.step(plan(step), result(step, seconds), False)
    for step, seconds in enumerate((1.1, 1.2, 9.0)):
        meter.step(plan(step), result(step, seconds), True)
    assert meter.slowdown() == pytest.approx(0.2)


def test_against_what_a_plan_should_take_sizes_do_not_matter() -> None:
    meter = Meter()
    meter.expect(lambda plan: plan.num_tokens * 1e-3)
    for step, tokens in ((0, 4), (4, 1000), (8, 30)):
        meter.step(plan(step, tokens), result(step, tokens * 2e-3), False)
    meter.step(plan(5, 4), result(5, 99.0), False)
    for step, tokens in ((13, 200), (14, 7)):
        meter.step(plan(step, tokens), result(step, tokens * 2.2e-3), True)
    assert meter.slowdown() == pytest.approx(0.1)


def test_steps_of_another_size_or_layout_are_no_yardstick() -> None:
    meter = Meter()
    meter.step(plan(1, tokens=4), result(1, 1.0), False)
    meter.step(plan(2, tokens=64), result(2, 8.0), True)
    meter.step(plan(3, layout=Layout.DP), result(3, 8.0), True)
    meter.step(plan(4, tokens=0), result(4, 8.0), True)
    assert meter.slowdown() is None
    meter.step(plan(5, tokens=5), result(5, 1.5), True)
    assert meter.slowdown() == pytest.approx(0.5)


def test_plain_steps_after_the_moving_ones_do_not_change_what_was_measured() -> None:
    meter = Meter()
    meter.step(plan(1), result(1, 1.0), False)
    meter.step(plan(2), result(2, 2.0), True)
    meter.step(plan(3), result(3, 4.0), False)
    assert meter.slowdown() == pytest.approx(1.0)


def test_each_switch_has_its_own_slowdown() -> None:
    meter = Meter()
    meter.step(plan(1), result(1, 1.0), False)
    meter.step(plan(2), result(2, 2.0), True)
    meter.begin()
    assert meter.slowdown() is None
    meter.step(plan(3), result(3, 1.5), True)
    assert meter.slowdown() == pytest.approx(0.5)


def test_the_stall_is_the_slowest_ranks_gap_at_the_first_new_step_less_the_median() -> None:
    meter, found = Meter(), record()
    for step, gaps in enumerate(((0.1, 0.2), (0.1, 0.3), (0.4, 0.1)), start=1):
        meter.step(plan(step), result(step, gaps=gaps), True)
    meter.commit(5, found)
    meter.step(plan(4), result(4, gaps=(0.3, 0.3)), True)
    assert found.stall_s is None
    meter.step(plan(5), result(5, gaps=(0.5, 1.3)), False)
    assert found.stall_s == pytest.approx(1.0)
    meter.step(plan(6), result(6, gaps=(9.0, 9.0)), False)
    assert found.stall_s == pytest.approx(1.0)


def test_a_first_step_that_comes_sooner_than_usual_is_no_stall() -> None:
    meter, found = Meter(), record()
    meter.step(plan(1), result(1, gaps=(0.5,)), True)
    meter.commit(2, found)
    meter.step(plan(2), result(2, gaps=(0.1,)), False)
    assert found.stall_s == 0.0


def test_without_gaps_to_compare_the_stall_is_unknown() -> None:
    meter, found = Meter(), record()
    meter.commit(1, found)
    meter.step(plan(1), result(1, gaps=(0.5,)), False)
    assert found.stall_s is None


def test_one_of_sixteen_steps_of_a_switch_moves_nothing() -> None:
    meter = Meter()
    meter.begin()
    wants = [meter.wants_plain() for _ in range(48)]
    assert [i for i, plain in enumerate(wants) if plain] == [15, 31, 47]


def test_a_long_switch_is_judged_by_its_own_plain_steps() -> None:
    """Steps get slower as contexts grow, whether they move anything or not: the ratio stays at one."""
    meter = Meter()
    for number in range(40):
        meter.step(plan(number), result(number, 1.0), False)
    meter.begin()
    ratios = []
    for number in range(40, 640):
        seconds = 1.0 + (number - 40) * 0.002
        ratios.append(meter.step(plan(number), result(number, seconds), not meter.wants_plain()))
    late = [ratio for ratio in ratios[400:] if ratio is not None]
    assert max(late) < 1.2, "judged by steps from before the switch it would be above two"
