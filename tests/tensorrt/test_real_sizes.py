"""Plans of published models at their real sizes, from config.json alone, and one of them held against torch."""

from __future__ import annotations

import dataclasses
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from splash_engines.tensorrt.cache import PlanCache
from splash_engines.tensorrt.plans import Form, PlanSettings, build_plans
from splash_trt.config import Layout
from splash_trt.models.config import LayerKind
from splash_trt.models.families import parse_config
from tests.oracles import published_configs as published
from tests.tensorrt.evaluated import Networks, api
from tests.tensorrt.segments_harness import Rank, worst

MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "glm-4.7-flash": (published.GLM, (1, 2, 4, 8)),
    "deepseek-v3.2": (published.V32, (8,)),
    "glm-5": (published.GLM_5, (8, 16)),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(MODELS))
def test_plans_from_a_configuration(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All layouts; one plan for each segment and sizes, however many layers and ranks use it."""
    config, ranks = MODELS[name]
    model = parse_config(config, where=name)
    settings = PlanSettings(targets=("sm_89", "sm_120"), ranks=ranks)
    begin = time.monotonic()
    built = build_plans(api(), model, settings, PlanCache(tmp_path))
    seconds = time.monotonic() - begin
    plans = built.plans
    assert plans.form is Form.PLUGIN and not built.cached
    assert len(plans.uses) == len(Layout) * sum(ranks)
    assert {len(use.plans) for use in plans.uses} == {9}
    sizes = [plan.num_bytes for plan in plans.plans.values()]
    assert max(sizes) < 16e6, "a plan that has weights in it"
    with capsys.disabled():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"\n{name}: {len(sizes)} plans for {len(plans.uses)} uses, {model.num_layers} layers, ranks {ranks}: "
            f"{seconds:.0f} s, slowest {max(built.seconds.values()):.1f} s, {sum(sizes) / 1e6:.1f} MB, {peak:.1f} GB"
        )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [Layout.TP, Layout.DP])
def test_glm_flash_computes_what_torch_does(layout: Layout) -> None:
    """A dense and a MoE layer of the real sizes, the last of 8 ranks, in float32."""
    model = parse_config(published.GLM, where="glm-4.7-flash")
    model = dataclasses.replace(model, layers=(LayerKind.DENSE, LayerKind.MOE))
    networks = Networks(model, torch.float32, experts="moe_in")
    found = worst(Rank(model, layout, 7, 8, "float32", networks, memory_bytes=4 << 30))
    assert all(difference < 2e-4 for difference in found.values()), found
