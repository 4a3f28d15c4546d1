"""What following the load brings, on few of the loads that `python -m perf.policy random` tries: all simulated, so that
the numbers are the same everywhere."""

from __future__ import annotations

import pytest

from perf.policy_loads import DEPLOYMENTS, FIXED, LABELS, Deployment
from perf.policy_study import Case, Run, few_then_crowd, solve, tasks_of
from splash_trt.simulate.outcome import AUTO, CEILING

RANDOM = (1, 2, 4, 6, 7, 10)
ADVERSARIES = (1, 2)
NO_WORSE = 1.03  # than the best fixed layout
NO_WORSE_ADVERSARY = 1.10
CEILING_SHARE = 0.75  # of each; the median over many loads is far higher


def case(kind: str, number: int, size: float) -> Case:
    runs: dict[str, Run] = {}
    for task in tasks_of(kind, number, size):
        runs |= {run.label: run for run in solve(task)}
    return Case(kind=kind, number=number, runs=runs)


def test_switches_have_the_limits_of_a_server_on_gpus() -> None:
    base = DEPLOYMENTS[0].base
    assert (base.migration_bytes, base.migration_max_slowdown) == (128 << 20, 0.005)


@pytest.mark.parametrize("where", DEPLOYMENTS[:2], ids=str)
def test_auto_is_no_worse_than_any_layout_where_each_is_good_at_one_part(where: Deployment) -> None:
    load = where.fitting(few_then_crowd())
    seconds = {label: where.outcome(load, label).makespan_s for label in LABELS}
    best = min(seconds[name] for name in FIXED)
    assert seconds[AUTO] <= best * NO_WORSE, seconds
    assert seconds[CEILING] <= seconds[AUTO], seconds


@pytest.mark.nightly
@pytest.mark.parametrize("number", RANDOM)
def test_auto_is_never_much_worse_than_the_best_fixed_layout(number: int) -> None:
    found = case("random", number, 1.0)
    assert found.over_best <= NO_WORSE, [*found.runs.values()]
    assert found.ceiling_share > CEILING_SHARE, [*found.runs.values()]


@pytest.mark.nightly
@pytest.mark.parametrize("number", ADVERSARIES)
def test_a_load_made_against_auto_cannot_fool_it_for_long(number: int) -> None:
    found = case("adversary", number, 1.0)
    assert found.over_best <= NO_WORSE_ADVERSARY, [*found.runs.values()]
