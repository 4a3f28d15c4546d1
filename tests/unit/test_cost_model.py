"""Times of steps: what they are made of, which layout is the fastest where, and what is learnt from observed ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from splash_trt.config import Formats, Layout
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.devices import BUILT_IN
from tests.unit.cost_cases import config, decode, deepseek_v3, prefill, splash_tiny

FP8 = Formats(weights="fp8")


def fastest(model: CostModel, make, num_ranks: int) -> Layout:  # type: ignore[no-untyped-def]
    return min(Layout, key=lambda layout: model.step_s(make(layout, num_ranks)))


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize("indexer", [False, True])
def test_regimes(device: str, indexer: bool) -> None:
    """TP for one request, DP for a crowd, CP for a long prompt, all from the same numbers."""
    model = CostModel(deepseek_v3(indexer), config(8, FP8), BUILT_IN[device])
    assert fastest(model, lambda layout, n: decode(layout, n, 1, 4096), 8) is Layout.TP
    assert fastest(model, lambda layout, n: decode(layout, n, 512, 4096), 8) is Layout.DP
    assert fastest(model, lambda layout, n: prefill(layout, n, 8192, 24576), 8) is (Layout.CP if indexer else Layout.TP)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_parts_add_up(layout: Layout, device: str) -> None:
    both = prefill(layout, 4, 300, 700)
    both = changed(both, decode_tokens=np.array([3.0, 0, 1, 2]), decode_context=np.array([900.0, 0, 10, 70]))
    both = changed(both, moved_bytes=1 << 20, sampled=7, decode_longest=400)
    for concurrent in (None, 2):
        model = CostModel(splash_tiny(), config(4), replace(BUILT_IN[device], concurrent_ranks=concurrent))
        for batch in (both, decode(layout, 4, 9, 200), decode(layout, 4, 1, 20), prefill(layout, 4, 70)):
            assert sum(model.parts(batch).values()) == pytest.approx(model.step_s(batch), rel=1e-9)
            assert min(model.parts(batch).values()) >= 0


def test_copies_cost_what_was_measured() -> None:
    """On an H200 64 MB beside a step of 1.25 ms cost 2.1 %, 4 MB nearly nothing."""
    model = CostModel(splash_tiny(), config(2), BUILT_IN["h200"])
    batch = decode(Layout.DP, 2, 64, 100)
    cost = {size: model.step_s(changed(batch, moved_bytes=size * 10**6)) - model.step_s(batch) for size in (4, 64)}
    assert cost[64] / 1.25e-3 == pytest.approx(0.021, abs=0.001)
    assert cost[4] / 1.25e-3 < 0.002
    only = changed(decode(Layout.DP, 2, 0, 1), moved_bytes=10**9)
    assert model.step_s(only) == pytest.approx(1.75 / 4.3e3, rel=0.01)
    for _ in range(100):
        model.observe(batch, 1.3 * model.step_s(batch))
    moving = changed(batch, moved_bytes=64 * 10**6)
    assert model.copies_s(64e6, Layout.DP) == pytest.approx(model.step_s(moving) - model.step_s(batch))


def test_ranks_that_share_cores_take_turns() -> None:
    """Four ranks on one core take four times as long as on four, but for what only rank 0 does."""
    device = replace(BUILT_IN["cpu"], step_s=1e-12)
    free, shared = (
        CostModel(splash_tiny(), config(4), replace(device, concurrent_ranks=cores)) for cores in (None, 1)
    )
    batch = decode(Layout.TP, 4, 4, 500)
    assert shared.step_s(batch) == pytest.approx(4 * free.step_s(batch))
    one_owner = prefill(Layout.DP, 4, 256)  # the others have nothing to attend to meanwhile
    assert shared.step_s(one_owner) < 3 * free.step_s(one_owner)


def test_more_work_never_takes_less() -> None:
    model = CostModel(deepseek_v3(), config(8, FP8), BUILT_IN["h200"])
    for layout in Layout:
        times = [model.step_s(decode(layout, 8, n, 2048)) for n in (1, 8, 64, 512)]
        assert times == sorted(times), layout
        times = [model.step_s(decode(layout, 8, 64, n)) for n in (64, 1024, 8192, 65536)]
        assert times == sorted(times), layout
        times = [model.step_s(prefill(layout, 8, n, 4096)) for n in (64, 512, 4096)]
        assert times == sorted(times), layout


def test_one_rank_has_no_layouts() -> None:
    model = CostModel(splash_tiny(), config(1), BUILT_IN["cpu"])
    times = {model.step_s(decode(layout, 1, 4, 300)) for layout in Layout}
    assert len(times) == 1


def test_a_format_without_figures_is_refused() -> None:
    device = replace(BUILT_IN["h200"], flops={"float32": 1e13})
    with pytest.raises(ValueError, match=r"device: h200 has no figure for bfloat16.*flops\.bfloat16"):
        CostModel(splash_tiny(), config(2), device)


def test_observed_steps_correct_predictions() -> None:
    model = CostModel(splash_tiny(), config(2), BUILT_IN["cpu"])
    tp, dp = decode(Layout.TP, 2, 4, 300), decode(Layout.DP, 2, 4, 300)
    before = {batch.layout: model.step_s(batch) for batch in (tp, dp)}
    for _ in range(300):
        model.observe(tp, 1.5 * before[Layout.TP])
    assert model.step_s(tp) == pytest.approx(1.5 * before[Layout.TP], rel=0.02)
    assert model.step_s(dp) == pytest.approx(1.5 * before[Layout.DP], rel=0.03)  # never ran: the common part
    moving = changed(tp, moved_bytes=1 << 20)
    model.observe(moving, 100.0)
    assert model.step_s(tp) == pytest.approx(1.5 * before[Layout.TP], rel=0.02)
    assert sum(model.parts(tp).values()) == pytest.approx(before[Layout.TP])
