"""The policy: where the shape of a load leads, and that it is slow to change its mind."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.scheduler.policy import (
    FULL_SHARE,
    LOOKS,
    MIN_DWELL_S,
    MIN_STEPS,
    Decision,
    Load,
    MeasuredPolicy,
    rule_of_thumb,
)

ROOM = {Layout.TP: 10_000, Layout.DP: 30_000, Layout.CP: 30_000, Layout.DOP: 40_000}
FEW = Load(
    now=0.0,
    layout=Layout.TP,
    num_ranks=4,
    running=2,
    waiting=0,
    held_tokens=100,
    longest_prefill=0,
    chunk_tokens=128,
    capacity_tokens=ROOM,
)
LOOK_S = 0.05


def load(**changes: object) -> Load:
    return dataclasses.replace(FEW, **changes)  # type: ignore[arg-type]


CROWD = load(running=48)
LONG = load(running=1, longest_prefill=3000)


class Driven:
    """A policy asked at steady intervals, whose decisions take effect at once."""

    def __init__(self, layout: Layout = Layout.TP) -> None:
        self.policy = MeasuredPolicy()
        self.layout = layout
        self.now = 100.0
        self.decisions: list[tuple[float, Decision]] = []

    def look(self, what: Load, times: int) -> None:
        for _ in range(times):
            self.now += LOOK_S
            decision = self.policy.decide(dataclasses.replace(what, now=self.now, layout=self.layout))
            if decision is not None:
                self.decisions.append((self.now, decision))
                self.layout = decision.layout

    def rest(self, what: Load) -> None:
        """Longer than a dwell."""
        self.look(what, round(MIN_DWELL_S / LOOK_S) + LOOKS)


class TestRule:
    @pytest.mark.parametrize(
        ("what", "layout"),
        [
            (FEW, Layout.TP),
            (CROWD, Layout.DP),
            (load(running=3, waiting=5), Layout.DP),
            (load(running=3, waiting=4), Layout.TP),
            (LONG, Layout.CP),
            (load(running=48, longest_prefill=3000), Layout.DP),
            (load(running=1, longest_prefill=4 * 128 - 1), Layout.TP),
            (load(held_tokens=9_500), Layout.DOP),
            (load(running=48, held_tokens=29_000), Layout.DOP),
            (load(running=0, layout=Layout.CP), Layout.CP),
        ],
    )
    def test_shape(self, what: Load, layout: Layout) -> None:
        assert rule_of_thumb(what)[0] is layout

    def test_data_parallel_is_kept_until_well_below_a_crowd(self) -> None:
        assert rule_of_thumb(load(running=5))[0] is Layout.TP
        assert rule_of_thumb(load(running=5, layout=Layout.DP))[0] is Layout.DP
        assert rule_of_thumb(load(running=3, layout=Layout.DP))[0] is Layout.TP

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_only_what_is_allowed_and_has_room(self, data: st.DataObject) -> None:
        layouts = data.draw(st.lists(st.sampled_from(list(Layout)), min_size=1, unique=True))
        room = {layout: data.draw(st.integers(1, 1000)) for layout in layouts}
        what = load(
            layout=data.draw(st.sampled_from(layouts)),
            running=data.draw(st.integers(0, 40)),
            waiting=data.draw(st.integers(0, 40)),
            held_tokens=data.draw(st.integers(0, 1000)),
            longest_prefill=data.draw(st.integers(0, 2000)),
            capacity_tokens=room,
        )
        wanted = rule_of_thumb(what)[0]
        assert wanted in layouts
        if what.running + what.waiting and what.held_tokens > FULL_SHARE * room[wanted]:
            roomy = [layout for layout in layouts if layout is not Layout.TP] or layouts
            assert room[wanted] == max(room[layout] for layout in roomy)


class TestPatience:
    def test_several_looks_in_a_row(self) -> None:
        driven = Driven()
        driven.rest(FEW)
        for _ in range(20):
            driven.look(CROWD, LOOKS - 1)
            driven.look(FEW, 1)
        assert not driven.decisions
        driven.look(CROWD, LOOKS)
        assert [decision.layout for _, decision in driven.decisions] == [Layout.DP]

    def test_not_soon_after_a_switch(self) -> None:
        driven = Driven()
        for _ in range(50):
            driven.look(CROWD, 10)
            driven.look(FEW, 10)
        times = [at for at, _ in driven.decisions]
        assert len(times) > 3
        assert min(later - earlier for earlier, later in zip(times, times[1:], strict=False)) >= MIN_DWELL_S

    def test_a_load_about_the_limit_does_not_flap(self) -> None:
        driven = Driven()
        for i in range(400):
            driven.look(load(running=8 if i % 40 < 20 else 7), 1)
        assert [decision.layout for _, decision in driven.decisions] == [Layout.DP]

    def test_a_long_prompt_does_not_have_to_wait(self) -> None:
        driven = Driven()
        driven.rest(FEW)
        driven.look(LONG, 1)
        assert driven.layout is Layout.CP

    def test_a_long_prompt_waits_out_the_dwell(self) -> None:
        driven = Driven()
        driven.look(LONG, round(MIN_DWELL_S / LOOK_S) - 1)
        assert not driven.decisions
        driven.look(LONG, 3)
        assert driven.layout is Layout.CP


class TestMeasures:
    def measured(self, tp_s: float, dp_s: float, steps: int) -> Driven:
        driven = Driven()
        for _ in range(steps):
            driven.policy.observe(Layout.TP, 48, 48, tp_s)
            driven.policy.observe(Layout.DP, 48, 48, dp_s)
        driven.rest(CROWD)
        return driven

    def test_slower_loses(self) -> None:
        assert self.measured(0.010, 0.012, MIN_STEPS).layout is Layout.TP

    def test_a_small_gain_is_not_worth_it(self) -> None:
        assert self.measured(0.010, 0.0095, MIN_STEPS).layout is Layout.TP

    def test_faster_wins(self) -> None:
        assert self.measured(0.010, 0.008, MIN_STEPS).layout is Layout.DP

    def test_a_few_steps_are_no_measure(self) -> None:
        assert self.measured(0.010, 0.012, MIN_STEPS - 1).layout is Layout.DP

    def test_steps_with_prompts_in_them_are_no_measure(self) -> None:
        driven = Driven()
        for _ in range(MIN_STEPS):
            driven.policy.observe(Layout.TP, 48, 48, 0.010)
            driven.policy.observe(Layout.DP, 48, 90, 0.500)
        driven.rest(CROWD)
        assert driven.layout is Layout.DP

    def test_slow_decodes_do_not_keep_a_prompt_away(self) -> None:
        driven = Driven()
        for _ in range(MIN_STEPS):
            driven.policy.observe(Layout.TP, 1, 1, 0.010)
            driven.policy.observe(Layout.CP, 1, 1, 0.050)
        driven.rest(LONG)
        assert driven.layout is Layout.CP

    def test_room_outweighs_time(self) -> None:
        driven = Driven()
        for _ in range(MIN_STEPS):
            driven.policy.observe(Layout.TP, 2, 2, 0.010)
            driven.policy.observe(Layout.DOP, 2, 2, 0.050)
        driven.rest(load(held_tokens=9_500))
        assert driven.layout is Layout.DOP
