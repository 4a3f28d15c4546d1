"""The switch benchmark on ranks that are threads: all pairs, each budget, on one deployment."""

from __future__ import annotations

from perf.migration.switch_ranks import TOUR, Settings, measure
from perf.migration.switches import summary, tables
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
