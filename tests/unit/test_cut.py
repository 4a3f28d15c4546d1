"""Contexts cut into parts: every row is in exactly one, and the parts are equal shares of the work."""

from __future__ import annotations

import heapq
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from splash_plugins.mla_attention.cut import (
    NUM_SMS,
    TILE_ROWS,
    cut,
    extra_parts,
    num_sms_of,
    part_tiles,
    parts_of,
    shares_sm,
)


def check(length: np.ndarray, found: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """The parts are all of the contexts, evenly, in arrays of the same shape as ever."""
    part, read_part, merged = found
    queries = len(length)
    extra = extra_parts(queries)
    assert part.shape == (queries + extra, 3) and read_part.shape == (queries, 2)
    assert len(merged) == min(queries, extra)
    assert {array.dtype for array in found} == {np.dtype(np.int32)}
    assert read_part[:, 1].sum() == (part[:, 0] >= 0).sum()
    for query, (first, count) in enumerate(read_part.tolist()):
        reads, begins, rows = part[first : first + count].T
        assert count >= 1 and (reads == query).all() and begins[0] == 0 and (begins % TILE_ROWS == 0).all()
        assert (begins[1:] == (begins + rows)[:-1]).all() and begins[-1] + rows[-1] == length[query]
        assert count == 1 or rows.min() > 0
        tiles = -(-rows // TILE_ROWS)
        assert tiles.max() - tiles.min() <= 1
    several = set(np.flatnonzero(read_part[:, 1] > 1).tolist())
    assert set(merged[merged >= 0].tolist()) == several and (merged[len(several) :] == -1).all()
    assert all(read_part[query].sum() <= 2 * extra for query in several)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("queries", [0, 1, 2, 17, 150, 600])
def test_parts_are_the_contexts(queries: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = rng.lognormal(5, 1.5, queries).astype(np.int32) * (rng.random(queries) < 0.8)
    for heads in (0, 10, 128):  # none: on ranks without heads
        check(length, cut(length, heads))
    for size in (1, 3):
        few = length.clip(0, 100)[:64]
        check(few, parts_of(few, size))


@pytest.mark.parametrize("queries", [1, 2, 16, 65, 512, 2000])
def test_no_lengths_are_too_much(queries: int) -> None:
    """Contexts of ten million rows, alone, among short ones or among none, on small devices and large ones."""
    rng = np.random.default_rng(queries)
    for num_sms, heads in ((1, 256), (132, 10), (200, 1)):
        for others in (np.zeros(queries), rng.integers(0, 300, queries), np.full(queries, 10_000_000)):
            length = others.astype(np.int32)
            length[queries // 2] = 10_000_000
            check(length, cut(length, heads, num_sms))


@pytest.mark.parametrize("queries", [0, 1, 65, 300])
def test_where_nothing_is_read_nothing_is_weighed(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of prompts alone: the parts are those of any size, found without looking for one."""
    length = np.zeros(queries, np.int32)
    expected = parts_of(length, 1)
    check(length, expected)
    monkeypatch.delattr("splash_plugins.mla_attention.cut.part_tiles")
    for heads in (0, 10, 128):
        assert all((x == y).all() for x, y in zip(cut(length, heads), expected, strict=True))


def test_a_rank_may_have_no_head() -> None:
    length = np.array([500, 0, 70], np.int32)
    check(length, cut(length, 0))


def uneven(most: int, others: int, count: int) -> np.ndarray:
    return np.array([others] * count + [most])


def number(tiles: np.ndarray, heads: int = 10) -> int:
    """Parts of the last context."""
    return int(cut(tiles * TILE_ROWS, heads)[1][-1, 1])


@pytest.mark.parametrize(
    "queries, tiles, parts",
    [(1, 10, 10), (1, 235, 59), (4, 32, 16), (4, 235, 30), (8, 16, 8), (16, 10, 4), (16, 16, 6), (32, 10, 4),
     (64, 10, 2), (128, 10, 1), (192, 10, 1), (256, 10, 1), (512, 3, 1), (512, 10, 1), (512, 1000, 1)],
)  # fmt: skip
def test_equal_contexts(queries: int, tiles: int, parts: int) -> None:
    """As measured to be the fastest, or as near to it as equal parts come."""
    assert number(np.full(queries, tiles)) == parts


@pytest.mark.parametrize(
    "tiles, parts", [(uneven(74, 14, 128), 4), (uneven(358, 47, 19), 36), (uneven(940, 32, 8), 94)]
)
def test_one_long_context(tiles: np.ndarray, parts: int) -> None:
    assert number(tiles) == parts


def test_padding_takes_no_parts_from_the_others() -> None:
    alone, padded = np.full(64, 10), np.array([0] * 64 + [10] * 64)
    assert number(alone) == number(padded) == 2


def test_many_heads_take_more_programs_and_are_dearer_to_merge() -> None:
    for queries, heads, parts in ((16, 64, 4), (16, 128, 2), (32, 64, 2), (32, 128, 1), (64, 64, 1), (64, 128, 1)):
        assert number(np.full(queries, 10), heads) == parts, (queries, heads)


def test_a_gpu_says_how_many_multiprocessors_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two, not the first."""
    devices = [SimpleNamespace(multi_processor_count=132), SimpleNamespace(multi_processor_count=78)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: devices[device.index])
    assert num_sms_of(torch.device("cuda", 1)) == 78
    assert num_sms_of(torch.device("cpu")) == NUM_SMS


def makespan(part: np.ndarray, at_once: int) -> float:
    """When the last program ends, in tiles, each beginning in the place that is free first."""
    free = [0.0] * at_once
    for rows in part[part[:, 0] >= 0, 2].tolist():
        heapq.heapreplace(free, free[0] + -(-rows // TILE_ROWS) + 2)
    return max(free)


@pytest.mark.parametrize("queries", [5, 20, 60, 100, 129, 150, 200, 300, 512])
def test_no_other_size_is_much_better(queries: int) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        tiles = (1 + (rng.lognormal(2, 1.2, queries) if seed % 2 else rng.integers(0, 25, queries))).astype(np.int64)
        at_once = NUM_SMS * (1 + shares_sm(queries, 10))
        chosen = makespan(parts_of(tiles * TILE_ROWS, part_tiles(tiles, at_once, 10))[0], at_once)
        sizes = [n for n in range(1, int(tiles.max()) + 1) if (-(-tiles // n)).sum() <= queries + extra_parts(queries)]
        best = min(makespan(parts_of(tiles * TILE_ROWS, size)[0], at_once) for size in sizes)
        # A part's least tiles cost up to two more, where there is little to do.
        assert chosen <= 1.15 * best + 2, (chosen, best)
