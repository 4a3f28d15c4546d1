"""The block tables that a rank keeps, and the changes of them that it sends to its device."""

from __future__ import annotations

import numpy as np

from splash_trt.plan import NO_PAGE, SAMPLING_DTYPE
from splash_trt.runtime.block_tables import BlockTables
from tests.plans import empty_plan

SLOTS, PAGES = 3, 4


def entries(*rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 4)


def test_a_place_that_changes_twice_is_told_with_its_last_page() -> None:
    """As where a target's pages are all told and compaction moves one of them, in one plan."""
    tables = BlockTables(rank=1, num_ranks=2, max_slots=SLOTS, max_pages=PAGES)
    plan = empty_plan(
        2,
        tables=entries((1, 2, 0, 9), (0, 2, 1, 7), (1, 2, 1, 8)),
        target_tables=entries((1, 2, 0, 9), (1, 2, 1, 8), (1, 0, 3, 5), (1, 2, 1, 3)),
    )
    tables.apply(plan)
    (place, page), (target_place, target_page) = tables.own_changes(plan)
    assert place.dtype == np.int64 and page.dtype == np.int32
    assert list(zip(place.tolist(), page.tolist(), strict=True)) == [(8, 9), (9, 8)]
    assert list(zip(target_place.tolist(), target_page.tolist(), strict=True)) == [(8, 9), (9, 3), (3, 5), (9, 3)]


def test_a_device_that_takes_the_changes_has_the_same_tables() -> None:
    tables = BlockTables(rank=0, num_ranks=2, max_slots=SLOTS, max_pages=PAGES)
    rng = np.random.default_rng(3)
    device, target = (np.full(SLOTS * PAGES, NO_PAGE, np.int32) for _ in range(2))
    for step in range(40):
        slots, pages = rng.integers(0, SLOTS, 6), rng.integers(0, PAGES, 6)
        rows = np.stack([rng.integers(0, 2, 6), slots, pages, rng.integers(0, 99, 6)], axis=1).astype(np.int32)
        plan = empty_plan(2, tables=rows[:3], target_tables=rows[3:], sampling=np.zeros(0, SAMPLING_DTYPE))
        tables.apply(plan)
        for mine, (place, page) in zip((device, target), tables.own_changes(plan), strict=True):
            order = rng.permutation(len(place))
            mine[place[order]] = page[order]
        assert device.tolist() == tables.pages.ravel().tolist(), step
        assert target.tolist() == tables.target_pages.ravel().tolist(), step
