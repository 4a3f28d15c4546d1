"""Every segment's network computes what the segment in plain torch computes: all variants, cuts, layouts and types."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from splash_trt.config import Layout
from splash_trt.models.config import ModelConfig
from tests.layouts.harness import Models
from tests.oracles.tiny_models import VARIANTS
from tests.tensorrt.evaluated import Networks
from tests.tensorrt.segments_harness import Rank, worst

# Of a network in float32 that is computed in float64, constants are still float32: 3e-8 of their size.
BOUNDS = {"float64": 2e-7, "float32": 2e-5, "bfloat16": 0.05}
# A nearly tied choice of experts falls either way once scores are rounded.
ROUTED = ("mlp.moe",)


@functools.cache
def networks(model: ModelConfig, dtype: torch.dtype, experts: str, collectives_in: bool) -> Networks:
    return Networks(model, dtype, experts=experts, collectives_in=collectives_in)


def check(model: ModelConfig, layout: Layout, rank: int, size: int, dtype: str, experts: str, inside: bool) -> None:
    kept = networks(model, getattr(torch, dtype), experts, inside)
    found = worst(Rank(model, layout, rank, size, dtype, kept))
    assert len(found) >= 8
    wrong = {n: d for n, d in found.items() if not d < BOUNDS[dtype] and not (dtype == "bfloat16" and n in ROUTED)}
    assert not wrong, (wrong, found)


CASES = (
    (Layout.TP, 1),
    (Layout.CP, 2),
    (Layout.DP, 3),
    (Layout.DOP, 4),  # of 3 heads one rank has none
)
MORE_CASES = [(layout, size) for size in (1, 2, 3, 4) for layout in Layout]


def check_all(model: ModelConfig, dtype: str, cases: Sequence[tuple[Layout, int]]) -> None:
    for index, (layout, size) in enumerate(cases):
        experts, inside = ("moe", "moe_in")[index % 2], index % 3 == 0
        check(model, layout, (size - 1) * (index % 3 != 1), size, dtype, experts, inside)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_float32_networks_without_rounding(models: Models, name: str) -> None:
    check_all(models.config(name), "float64", CASES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["v3_half_rope", "v2_grouped"])
def test_rounded_networks(models: Models, name: str, dtype: str) -> None:
    check_all(models.config(name), dtype, CASES[2:])


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_every_case(models: Models, name: str, dtype: str) -> None:
    check_all(models.config(name), dtype, MORE_CASES)
