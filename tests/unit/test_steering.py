"""Budgets of switches under steps that vary: they find the slowdown that is allowed, and noise moves them little."""

from __future__ import annotations

import numpy as np
import pytest

from perf.migration.steering import CASES, LAYOUTS, Load, row, simulate
from splash_trt.migration.budget import MAX_BUDGET_BYTES

TOUR = len(LAYOUTS)


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.3])
def test_no_budget_collapses_under_noise(noise: float) -> None:
    """200 servers, a tour each: steps vary by more than is allowed, are held up, and become longer all the time."""
    load = Load(cost=0.003, noise=noise, armed=0.006)
    least = min(moved.budget for seed in range(200) for moved in simulate(load, seed, TOUR))
    assert load.start_bytes / 3 < least


def test_a_long_switch_of_long_contexts_takes_the_steps_that_it_must() -> None:
    """Held against steps of before the switch it would look ever slower and move ever less."""
    load = Load(cost=0.003, armed=0.006, growth=3e-4, switch_bytes=(20_000_000_000,))
    for seed in range(10):
        for moved in simulate(load, seed, 4):
            assert moved.steps < 2.5 * load.switch_bytes[0] / load.start_bytes


@pytest.mark.parametrize(("cost", "low", "high"), [(0.006, 0.0025, 0.006), (0.01, 0.0025, 0.006)])
def test_the_slowdown_that_is_allowed_is_found_within_some_tours(cost: float, low: float, high: float) -> None:
    last = [moved for seed in range(10) for moved in simulate(Load(cost=cost), seed, 8 * TOUR)[-TOUR:]]
    assert low < np.median([moved.slowdown for moved in last]) < high


def test_bytes_that_cost_nothing_may_become_more() -> None:
    last = [simulate(Load(cost=0.0, noise=0.002), seed, 4 * TOUR)[-1].budget for seed in range(10)]
    assert np.median(last) == MAX_BUDGET_BYTES


def test_what_costs_much_shrinks_within_a_switch() -> None:
    load = Load(cost=0.3, switch_bytes=(10_000_000_000,))
    for seed in range(10):
        assert simulate(load, seed, 1)[0].slowdown < 0.1


def test_on_cpus_too() -> None:
    """5 % are allowed; steps vary by 5 % and are 10 % slower by 1 MiB, the first budget."""
    load = Load(
        cost=0.1 * 100e6 / (1 << 20) * 2.5, noise=0.05, step_s=0.025, start_bytes=1 << 20, max_slowdown=0.05,
        floor_bytes=1000, switch_bytes=(18 << 20, 40 << 20),
    )  # fmt: skip
    runs = [simulate(load, seed, 4 * TOUR) for seed in range(10)]
    assert min(moved.budget for run in runs for moved in run) > 1 << 16
    assert 0.025 < np.median([moved.slowdown for run in runs for moved in run[-TOUR:]]) < 0.15


def test_the_table_has_a_line_a_case() -> None:
    name, load = next(iter(CASES.items()))
    assert row(name, load).count("steps") == 3
