"""Corrections follow what is observed, slowly, and are not thrown by single steps."""

from __future__ import annotations

import random

import pytest

from splash_trt.config import Layout
from splash_trt.scheduler.correction import Correction

TOKENS = 16.0


def observe(correction: Correction, layout: Layout, ratio: float, steps: int, tokens: float | None = TOKENS) -> None:
    for _ in range(steps):
        correction.observe(layout, tokens, 0.01, 0.01 * ratio)


def test_converges_to_each_layouts_factor() -> None:
    correction, source = Correction(), random.Random(1)
    true = {Layout.TP: 1.3, Layout.DP: 0.8, Layout.CP: 2.0}
    for _ in range(12):
        for layout, factor in true.items():
            for _ in range(50):
                correction.observe(layout, TOKENS, 0.02, 0.02 * factor * source.lognormvariate(0, 0.1))
    for layout, factor in true.items():
        assert correction.factor(layout, TOKENS) == pytest.approx(factor, rel=0.05)


def test_a_layout_that_never_ran_follows_the_common_part() -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.4, 300)
    observe(correction, Layout.DP, 1.6, 300)
    assert correction.factor(Layout.CP, TOKENS) == correction.factor(Layout.DOP, TOKENS)
    assert correction.factor(Layout.CP, TOKENS) == pytest.approx((1.4 * 1.6) ** 0.5, rel=0.02)
    assert correction.factor(Layout.CP, None) == 1.0  # prompts are another matter


def test_few_observations_say_little() -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.0, 400)
    observe(correction, Layout.DP, 1.4, 4)
    assert 1.0 < correction.factor(Layout.DP, TOKENS) < 1.15


@pytest.mark.parametrize("ratio", [100.0, 4.0, 0.01])
def test_one_outlier_changes_little(ratio: float) -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.2, 100)
    before = correction.factor(Layout.TP, TOKENS)
    observe(correction, Layout.TP, ratio, 1)
    assert correction.factor(Layout.TP, TOKENS) == pytest.approx(before, rel=0.05)


def test_the_first_step_after_a_switch_is_left_out() -> None:
    correction = Correction()
    for _ in range(50):
        for layout in (Layout.TP, Layout.DP):
            correction.observe(layout, TOKENS, 0.01, 0.03)
    assert correction.factor(Layout.TP, TOKENS) == 1.0


def test_follows_a_change_even_a_large_one() -> None:
    correction = Correction()
    observe(correction, Layout.TP, 1.0, 500)
    observe(correction, Layout.TP, 8.0, 3000)
    assert correction.factor(Layout.TP, TOKENS) == pytest.approx(8.0, rel=0.05)


def test_nonsense_is_ignored_and_all_is_deterministic() -> None:
    first, second = Correction(), Correction()
    for correction in (first, second):
        source = random.Random(2)
        for _ in range(200):
            layout = source.choice(list(Layout))
            correction.observe(layout, source.choice([None, 1.0, 30.0, 900.0]), 0.01, source.choice([0.0, 0.008, 0.02]))
            correction.observe(layout, TOKENS, 0.0, 0.01)
    for layout in Layout:
        for tokens in (None, 1.0, 30.0, 900.0):
            assert first.factor(layout, tokens) == second.factor(layout, tokens)


def test_small_batches_say_little_of_large_ones_once_these_ran() -> None:
    correction = Correction()
    observe(correction, Layout.DP, 0.9, 400, tokens=256)
    observe(correction, Layout.DP, 1.2, 4000, tokens=2)  # a rollout's long end
    assert correction.factor(Layout.DP, 256) == pytest.approx(0.9, rel=0.03)
    assert correction.factor(Layout.DP, 2) == pytest.approx(1.2, rel=0.01)
    assert 0.9 < correction.factor(Layout.DP, 32) < 1.2


def test_small_batches_stand_for_large_ones_until_these_ran() -> None:
    correction = Correction()
    observe(correction, Layout.DP, 1.2, 4000, tokens=4)
    assert correction.factor(Layout.DP, 64) == pytest.approx(1.2, rel=0.05)
    assert correction.factor(Layout.DP, None) == 1.0


def test_certainty_grows_with_steps_of_about_that_size() -> None:
    correction = Correction()
    assert correction.certainty(Layout.DOP, 64) == 0.0
    observe(correction, Layout.DOP, 1.0, 100, tokens=64)
    assert correction.certainty(Layout.DOP, 60) > 0.75 > correction.certainty(Layout.DOP, 4)
    assert correction.certainty(Layout.TP, 64) == 0.0
