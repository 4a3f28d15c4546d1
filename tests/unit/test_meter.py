"""What a switch costs the steps it runs in: slowdown against like steps without moves, and the stall at its commit."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.layout.switch import Record
from splash_trt.migration.budget import Comparison
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
        meter.step(plan(step), result(step, seconds), 0)
    for step, seconds in enumerate((1.1, 1.2, 9.0)):
        meter.step(plan(step), result(step, seconds), 1)
    assert meter.slowdown() == pytest.approx(0.2)


def test_against_what_a_plan_should_take_sizes_do_not_matter() -> None:
    meter = Meter()
    meter.expect(lambda plan: plan.num_tokens * 1e-3)
    for step, tokens in ((0, 4), (4, 1000), (8, 30)):
        meter.step(plan(step, tokens), result(step, tokens * 2e-3), 0)
    meter.step(plan(5, 4), result(5, 99.0), 0)
    for step, tokens in ((13, 200), (14, 7)):
        meter.step(plan(step, tokens), result(step, tokens * 2.2e-3), 1)
    assert meter.slowdown() == pytest.approx(0.1)


def test_steps_of_another_size_or_layout_are_no_yardstick() -> None:
    meter = Meter()
    meter.step(plan(1, tokens=4), result(1, 1.0), 0)
    meter.step(plan(2, tokens=64), result(2, 8.0), 1)
    meter.step(plan(3, layout=Layout.DP), result(3, 8.0), 1)
    meter.step(plan(4, tokens=0), result(4, 8.0), 1)
    assert meter.slowdown() is None
    meter.step(plan(5, tokens=5), result(5, 1.5), 1)
    assert meter.slowdown() == pytest.approx(0.5)


def test_plain_steps_after_the_moving_ones_do_not_change_what_was_measured() -> None:
    meter = Meter()
    meter.step(plan(1), result(1, 1.0), 0)
    meter.step(plan(2), result(2, 2.0), 1)
    meter.step(plan(3), result(3, 4.0), 0)
    assert meter.slowdown() == pytest.approx(1.0)


def test_each_switch_has_its_own_slowdown() -> None:
    meter = Meter()
    meter.step(plan(1), result(1, 1.0), 0)
    meter.step(plan(2), result(2, 2.0), 1)
    meter.begin()
    assert meter.slowdown() is None
    meter.step(plan(3), result(3, 1.5), 1)
    assert meter.slowdown() == pytest.approx(0.5)


def test_the_stall_is_the_slowest_ranks_gap_at_the_first_new_step_less_the_median() -> None:
    meter, found = Meter(), record()
    for step, gaps in enumerate(((0.1, 0.2), (0.1, 0.3), (0.4, 0.1)), start=1):
        meter.step(plan(step), result(step, gaps=gaps), 1)
    meter.commit(5, found)
    meter.step(plan(4), result(4, gaps=(0.3, 0.3)), 1)
    assert found.stall_s is None
    meter.step(plan(5), result(5, gaps=(0.5, 1.3)), 0)
    assert found.stall_s == pytest.approx(1.0)
    meter.step(plan(6), result(6, gaps=(9.0, 9.0)), 0)
    assert found.stall_s == pytest.approx(1.0)


def test_a_first_step_that_comes_sooner_than_usual_is_no_stall() -> None:
    meter, found = Meter(), record()
    meter.step(plan(1), result(1, gaps=(0.5,)), 1)
    meter.commit(2, found)
    meter.step(plan(2), result(2, gaps=(0.1,)), 0)
    assert found.stall_s == 0.0


def test_without_gaps_to_compare_the_stall_is_unknown() -> None:
    meter, found = Meter(), record()
    meter.commit(1, found)
    meter.step(plan(1), result(1, gaps=(0.5,)), 0)
    assert found.stall_s is None


MIB = 1 << 20


def compared(seconds: list[float], moved: list[int], **more: int) -> list[Comparison]:
    """What comes of a switch's steps that took so long and moved so much."""
    meter = Meter()
    meter.begin()
    plans = [msgspec.structs.replace(plan(number), attempt=1, **more) for number in range(len(seconds))]
    found = [meter.step(p, result(p.step, s), n) for p, s, n in zip(plans, seconds, moved, strict=True)]
    return [comparison for comparison in found if comparison is not None]


def test_one_of_eight_steps_of_a_switch_moves_nothing() -> None:
    meter = Meter()
    for _ in range(2):
        meter.begin()
        wants = [meter.wants_still() for _ in range(24)]
        assert [i for i, still in enumerate(wants) if still] == [3, 11, 19]


def test_a_still_step_is_compared_with_those_around_it() -> None:
    (found,) = compared([1.0, 1.1, 1.2, 1.0, 1.1, 1.2, 9.0, 1.0], [100 * MIB] * 3 + [0] + [100 * MIB] * 4)
    assert found.slowdown == pytest.approx(0.15)
    assert found.num_bytes == pytest.approx(MIB * (1 / 1.1 + 1 / 1.2) / 2), "as in a step of 10 ms"
    assert found.error == pytest.approx(1.4826 * 0.05 * (1 + np.pi / 12) ** 0.5)


def test_slow_changes_cancel() -> None:
    """Contexts that grow make each step 1 % longer than the one before; bytes 5 %."""
    moved = [0 if number % 8 == 3 else MIB for number in range(80)]
    seconds = [(1 + 0.01 * number) * (1.05 if n else 1.0) for number, n in enumerate(moved)]
    found = compared(seconds, moved)
    assert len(found) == 10 and all(c.slowdown == pytest.approx(0.05, abs=1e-3) for c in found)


def test_still_steps_among_few_that_moved_or_others_unlike_them_are_not_compared() -> None:
    assert not compared([1.0] * 7, [1, 0, 0, 0, 1, 1, 1])
    assert len(compared([1.0] * 7, [1, 0, 1, 0, 1, 1, 0])) == 1
    assert not compared([1.0] * 7, [1] * 7)
    assert not compared([1.0] * 6, [1, 1, 1, 0, 1, 1])
    meter = Meter()
    for number, moved in enumerate([1, 1, 1, 0, 1, 1, 1]):
        size = 4 if number < 5 else 64
        p = msgspec.structs.replace(plan(number, size), attempt=1)
        assert meter.step(p, result(number), moved) is None, "two of those behind it have other sizes"


def test_steps_of_two_switches_are_not_compared() -> None:
    meter = Meter()
    for number, moved in enumerate([1, 1, 1, 0]):
        meter.step(msgspec.structs.replace(plan(number), attempt=1), result(number), moved)
    meter.begin()
    for number in range(4, 8):
        assert meter.step(msgspec.structs.replace(plan(number), attempt=2), result(number), 1) is None


def test_a_still_step_of_a_switch_is_looked_at_though_its_expected_time_has_to_be_computed() -> None:
    meter = Meter()
    meter.expect(lambda plan: plan.num_tokens * 1e-3)
    meter.begin()
    found = []
    for number, (tokens, moved) in enumerate([(4, 1), (9, 1), (70, 1), (5, 0), (8, 1), (33, 1), (6, 1)], start=2):
        p = msgspec.structs.replace(plan(number, tokens), attempt=1)
        found.append(meter.step(p, result(number, tokens * (1.1e-3 if moved else 1e-3)), moved))
    assert found[:-1] == [None] * 6 and found[-1] is not None
    assert found[-1].slowdown == pytest.approx(0.1)
