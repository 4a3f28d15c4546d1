"""The switch benchmark on ranks that are threads: all pairs, each budget, on one deployment."""

from __future__ import annotations

import msgspec
import pytest

from perf.harness import Row
from perf.migration.switch_ranks import TOUR, Settings, Watched, add_slowdowns, measure
from perf.migration.switches import expected_steps, summary, tables
from splash_trt.dist.world import ThreadWorld


def test_every_pair_is_measured_with_every_budget() -> None:
    settings = Settings(
        ranks=2,
        run_on="cpu",
        model="tiny",
        dtype="float32",
        check_dtype="float32",
        simulate_routing="uniform",
        max_batch_tokens=64,
        batch=2,
        contexts=(8,),
        budgets=(12288, 1 << 20),
        max_slowdown=1000.0,
        switch_deadline_s=600.0,
        rounds=2,
        around=2,
        check=False,
    )
    found = ThreadWorld(2, 60.0).run(lambda world: measure(world, settings))[0]
    pairs = {f"{a.name.lower()}-{b.name.lower()}" for a, b in zip(TOUR, TOUR[1:], strict=False)}
    steps = {}
    for budget in settings.budgets:
        mine = [row for row in found.rows if row["budget_kib"] == budget // 1024]
        assert len(mine) == 12 and {row["pair"] for row in mine} == pairs
        steps[budget] = sum(int(row["migrating_steps"] or 0) for row in mine)
    assert steps[12288] > steps[1 << 20], "the budget made no difference"
    assert set(tables(found.rows)) == {"states", "bytes", "cost"}
    assert "24 switches" in summary(2, found)
    assert all(row["budget_mib"] for row in found.rows)
    # Each switch takes fewer steps here than are reckoned with, and is one of a tour that counts or of the first one.
    assert expected_steps(settings) == 2 * 2 * 12 * (4 + 2 + 24)
    assert expected_steps(msgspec.structs.replace(settings, around=60)) == 2 * 12 * (2 * 28 + 8 + 60)


def test_percentiles_are_those_of_all_switches_of_a_pair() -> None:
    """Slowdowns of 0 to 99 % in two switches, against steps that vary by up to 20 % and 0."""
    seen = [
        Watched(
            layout=layout,
            at=at,
            step_s=1.0,
            variations=[0.0, varies],
            copying=[(9, 1 + slower / 100) for slower in slowdowns],
        )
        for layout, at, varies, slowdowns in (
            ("TP", 0.0, 0.2, range(50)),
            ("TP", 5.0, 0.2, range(50, 100)),
            ("DP", 2.0, 0.0, range(0)),
        )
    ]
    rows: list[Row] = [{"pair": pair} for pair in ("tp-dp", "tp-dp", "dp-tp")]
    assert len(add_slowdowns(rows, seen)) == 100
    assert [row["device_slowdown"] for row in rows] == [pytest.approx(0.245), pytest.approx(0.745), None]
    assert [row["device_variation_p99"] for row in rows] == [pytest.approx(0.2), pytest.approx(0.2), 0.0]
    p99 = pytest.approx(1.9801 / 1.2 - 1)
    assert [row["device_slowdown_p99"] for row in rows] == [p99, p99, None]
