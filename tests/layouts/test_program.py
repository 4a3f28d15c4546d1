"""The program that GPUs run computes the model too, in every layout, padded as for a graph and not: the same cases and
the same oracle as the plain runner's (test_oracle.py), with plain torch in the place of each kernel."""

from __future__ import annotations

import pytest

from tests.device_ranks import device_ranks
from tests.layouts.harness import LAYOUTS, Models
from tests.layouts.test_oracle import check
from tests.oracles.tiny_models import VARIANTS

PADDED, PLAIN = (3, 5, 8), ()
CASES = [
    *(("v3_base", layout, 2, PADDED) for layout in LAYOUTS),
    *(("v3_half_rope", layout, 3, PADDED) for layout in LAYOUTS),
    *(("glm_mixed", layout, ranks, PLAIN) for layout, ranks in zip(LAYOUTS, (1, 2, 4, 3), strict=True)),
    ("v2_grouped", "tp", 1, PADDED),
    ("v3_mtp", "cp", 8, PADDED),  # ranks without heads
    ("v3_mtp", "dop", 10, PLAIN),  # ranks with neither heads nor experts
]


@pytest.mark.parametrize(("name", "layout", "ranks", "buckets"), CASES)
def test_program_computes_the_model(
    models: Models, name: str, layout: str, ranks: int, buckets: tuple[int, ...]
) -> None:
    with device_ranks(buckets):
        check(models, name, layout, ranks, chunked=ranks != 8)


@pytest.mark.nightly
@pytest.mark.parametrize("buckets", [PADDED, PLAIN])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_program_computes_the_model_in_every_case(
    models: Models, name: str, layout: str, ranks: int, buckets: tuple[int, ...]
) -> None:
    with device_ranks(buckets):
        check(models, name, layout, ranks, chunked=True)
