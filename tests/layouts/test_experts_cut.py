"""With every expert cut over the ranks, every layout computes the model: the oracle, the cases and the bound of
test_oracle.py."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from splash_trt.weights import shards
from splash_trt.weights.spec import TensorSpec
from tests.device_ranks import device_ranks
from tests.layouts.harness import LAYOUTS, Models
from tests.layouts.test_oracle import check

CASES = [
    *(("v3_base", layout, 2) for layout in LAYOUTS),
    *(("v3_mtp", layout, 3) for layout in LAYOUTS),  # 22 numbers: 8 + 7 + 7
    ("v2_grouped", "tp", 1),
    ("glm_base", "dp", 3),
    ("v3_half_rope", "cp", 9),  # more ranks than experts
]


@pytest.mark.parametrize(("name", "layout", "ranks"), CASES)
def test_experts_cut_inside_compute_the_model(models: Models, name: str, layout: str, ranks: int) -> None:
    check(models, name, layout, ranks, chunked=ranks == 3, experts_cut="inside")


@pytest.mark.parametrize(("layout", "ranks"), [("dop", 2), ("cp", 3)])
def test_padded_steps_too(models: Models, layout: str, ranks: int) -> None:
    with device_ranks((3, 5, 8)):
        check(models, "v3_mtp", layout, ranks, chunked=True, experts_cut="inside")


def test_up_rows_of_another_rank_are_noticed(models: Models) -> None:
    own_parts = shards.own_parts

    def turned(spec: TensorSpec, rank: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
        mine, theirs = (own_parts(spec, r, num_ranks) for r in (rank, (rank + 1) % num_ranks))
        return (*mine[:1], *theirs[1:])

    with patch.object(shards, "own_parts", turned), pytest.raises(AssertionError):
        check(models, "v3_base", "tp", 2, chunked=False, experts_cut="inside")
