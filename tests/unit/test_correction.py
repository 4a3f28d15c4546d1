"""Corrections follow what is observed, slowly, and are not thrown by single steps."""

from __future__ import annotations

import random

import pytest

from splash_trt.config import Layout
from splash_trt.scheduler.correction import Correction


def observe(correction: Correction, layout: Layout, ratio: float, steps: int, prefill: bool = False) -> None:
    for _ in range(steps):
        correction.observe(layout, prefill, 0.01, 0.01 * ratio)


def test_converges_to_each_layouts_factor() -> None:
    correction, source = Correction(), random.Random(1)
    true = {Layout.TP: 1.3, Layout.DP: 0.8, Layout.CP: 2.0}
    for _ in range(12):
        for layout, factor in true.items():
            for _ in range(50):
                correction.observe(layout, False, 0.02, 0.02 * factor * source.lognormvariate(0, 0.1))
    for layout, factor in true.items():
        assert correction.factor(layout, False) == pytest.approx(factor, rel=0.05)


def test_a_layout_that_never_ran_follows_the_common_part() -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.4, 300)
    observe(correction, Layout.DP, 1.6, 300)
    assert correction.factor(Layout.CP, False) == correction.factor(Layout.DOP, False)
    assert correction.factor(Layout.CP, False) == pytest.approx((1.4 * 1.6) ** 0.5, rel=0.02)
    assert correction.factor(Layout.CP, True) == 1.0  # prompts are another matter


def test_few_observations_say_little() -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.0, 400)
    observe(correction, Layout.DP, 1.4, 4)
    assert 1.0 < correction.factor(Layout.DP, False) < 1.15


@pytest.mark.parametrize("ratio", [100.0, 4.0, 0.01])
def test_one_outlier_changes_little(ratio: float) -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.2, 100)
    before = correction.factor(Layout.TP, False)
    observe(correction, Layout.TP, ratio, 1)
    assert correction.factor(Layout.TP, False) == pytest.approx(before, rel=0.05)


def test_the_first_step_after_a_switch_is_left_out() -> None:
    correction = Correction()
    for _ in range(50):
        for layout in (Layout.TP, Layout.DP):
            correction.observe(layout, False, 0.01, 0.03)
    assert correction.factor(Layout.TP, False) == 1.0


def test_follows_a_change_even_a_large_one() -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.0, 500)
    observe(correction, Layout.TP, 8.0, 3000)
    assert correction.factor(Layout.TP, False) == pytest.approx(8.0, rel=0.05)


def test_nonsense_is_ignored_and_all_is_deterministic() -> None:
    first, second = Correction(), Correction()
    for correction in (first, second):
        source = random.Random(2)
        for _ in range(200):
            layout = source.choice(list(Layout))
            correction.observe(layout, source.random() < 0.5, 0.01, source.choice([0.0, 0.008, 0.02]))
            correction.observe(layout, False, 0.0, 0.01)
    for layout in Layout:
        for prefill in (False, True):
            assert first.factor(layout, prefill) == second.factor(layout, prefill)
