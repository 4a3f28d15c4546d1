"""Padded as for a graph, a step's program computes the model too, in every layout: the same cases and the same oracle
as without padding (test_oracle.py)."""

from __future__ import annotations

import pytest

from tests.device_ranks import device_ranks
from tests.layouts.harness import LAYOUTS, Models
from tests.layouts.test_oracle import check
from tests.oracles.tiny_models import VARIANTS

PADDED = (3, 5, 8)
CASES = [
    *(("v3_base", layout, 2) for layout in LAYOUTS),
    *(("v3_half_rope", layout, 3) for layout in LAYOUTS),
    ("v2_grouped", "tp", 1),
    ("v3_mtp", "cp", 8),  # ranks without heads
    ("v3_mtp", "dop", 10),  # ranks with neither heads nor experts
]


@pytest.mark.parametrize(("name", "layout", "ranks"), CASES)
def test_program_computes_the_model(models: Models, name: str, layout: str, ranks: int) -> None:
    with device_ranks(PADDED):
        check(models, name, layout, ranks, chunked=ranks != 8)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_program_computes_the_model_in_every_case(models: Models, name: str, layout: str, ranks: int) -> None:
    with device_ranks(PADDED):
        check(models, name, layout, ranks, chunked=True)
