"""Padding a step to a shape that a graph may hold: the same shape on all ranks, and nothing but padding added."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from splash_plugins.mla_attention import cut
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.partition import rank_counts, token_ranks
from splash_trt.plan import SAMPLE, Plan
from splash_trt.runtime.block_tables import BlockTables
from splash_trt.runtime.shapes import Shapes, ladder
from splash_trt.runtime.step_arrays import ArrayBuilder, StepArrays
from splash_trt.runtime.upload import Uploader
from tests.plans import empty_plan
from tests.unit.test_cut import check as check_parts

PAGES = 20
# max_batch_tokens, max_running, the largest decoding step that is padded.
SIZES = [(40, 6, 6), (40, 16, 8), (7, 3, 3), (1, 1, 1), (600, 12, 12), (400, 150, 150)]
READS_NOTHING = {"want_rank": -1, "owned": -1, "owner": -1, "page": -1, "target_page": -1, "stripe_page": -1, "ids": -1,
                 "id_slot": -1, "read_length": 0}  # fmt: skip

PARTS = ("part", "read_part", "merged")


def random_plan(config: EngineConfig, layout: Layout, rng: np.random.Generator, decodes: float) -> Plan:
    """Decodes, as so large a share of the rows, chunks and whole prompts; some prompts are scored."""
    room, rows = config.max_batch_tokens, []
    for slot in rng.permutation(config.max_running)[: rng.integers(1, config.max_running + 1)]:
        start = int(rng.integers(0, 30)) if rng.random() < 0.8 else 0
        count = min(1 if rng.random() < decodes else int(rng.integers(1, 30)), room)
        if count:
            rows.append((slot, start, count))
            room -= count
    slot, start, count = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    home = np.zeros_like(slot) if layout is Layout.TP else rng.integers(0, config.num_ranks, len(rows), np.int32)
    absorbed = count <= config.most_absorbed(layout)
    total, ends = int(count.sum()), np.cumsum(count)
    want = np.union1d((ends - 1)[rng.random(len(rows)) < 0.8], np.flatnonzero(rng.random(total) < 0.1))
    where = (layout, home, start, count, absorbed)
    ranks = token_ranks(*where, num_ranks=config.num_ranks, page_tokens=config.page_tokens)
    return msgspec.structs.replace(
        empty_plan(config.num_ranks),
        layout=layout,
        slot=slot,
        start=start,
        count=count,
        home=home,
        absorbed=absorbed,
        token=rng.integers(-1, 50, total),
        want_index=want.astype(np.int32),
        want_target=np.where(rng.random(len(want)) < 0.9, SAMPLE, 3),
        counts=rank_counts(ranks, total, config.num_ranks),
        armed=np.zeros(len(rows), np.bool_),
    )


def built(config: EngineConfig, plan: Plan, decode: list[int]) -> list[StepArrays]:
    """On every rank."""
    found = []
    for rank in range(config.num_ranks):
        tables = BlockTables(rank, config.num_ranks, config.max_running, PAGES)
        tables.all_pages[:] = np.arange(config.max_running * PAGES, dtype=np.int32).reshape(-1, PAGES)
        heads = range(config.num_ranks)  # the first has none
        found.append(ArrayBuilder(config, rank, tables, Shapes(config, decode), heads=heads).build(plan))
    return found


def check(plain: StepArrays, padded: StepArrays) -> None:
    for step in (plain, padded):
        found = [step.arrays[name] for name in PARTS]
        check_parts(step.arrays["read_length"], (found[0], found[1], found[2]))
    for name, values in plain.arrays.items():
        if name in PARTS:
            continue
        count = len(values)
        assert padded.arrays[name][:count].tolist() == values.tolist(), name
        assert (padded.arrays[name][count:] == READS_NOTHING.get(name, padded.arrays[name][count:])).all(), name
    assert (padded.counts, padded.absorbed_counts) == (plain.counts, plain.absorbed_counts)
    if not padded.shape.context:
        assert plain.rounds == padded.rounds == ()
        return
    (one,), count = padded.rounds, sum(part.num_rows for part in plain.rounds)
    assert one.num_rows == padded.shape.context and (one.holder[count:] == -1).all()
    for part in plain.rounds:
        for name in ("holder", "page", "offset", "segments"):
            values = getattr(part, name)
            assert getattr(one, name)[: len(values)].tolist() == values.tolist()
        assert not one.segments[len(part.segments) :].any()
    (uploaded,) = Uploader(torch.device("cpu"), 0)(padded, fixed=False).rounds
    assert len(uploaded.tiles) == padded.shape.tiles


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", SIZES)
def test_padded_steps_are_the_steps(layout: Layout, ranks: int, sizes: tuple[int, int, int]) -> None:
    most_tokens, most_running, most_padded = sizes
    config = EngineConfig(
        num_ranks=ranks,
        layout=layout,
        max_batch_tokens=most_tokens,
        max_running=most_running,
        page_tokens=4,
        context_block_tokens=4096,
        dop_absorbed_tokens=3,
    )
    rng, seen = np.random.default_rng(ranks + most_tokens), set()
    for decodes in (1.0, 0.9, 0.5, 1.0) * 4:
        plan = random_plan(config, layout, rng, decodes)
        padded = built(config, plan, ladder(1, most_padded, 4))
        assert len({step.padded for step in padded}) == 1
        if padded[0].padded:
            assert len({step.shape for step in padded}) == 1, "ranks meet inside of a graph"
            seen.add(padded[0].shape.context > 0)
            for step, plain in zip(padded, built(config, plan, []), strict=True):
                check(plain, step)
    assert seen == ({False} if most_tokens == 1 else {False, True}), "a kind of step was never padded"


def test_a_shape_fixes_what_a_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding alone, for which a graph is captured, and a step in its place: the same names, sizes and types; and
    contexts are cut for the heads that attend to them here."""
    asked: list[int] = []

    def noted(length: np.ndarray, heads: int, num_sms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        asked.append(heads)
        assert num_sms == 7
        return cut.parts_of(length, 1)

    monkeypatch.setattr(cut, "cut", noted)
    heads = (5, 3, 0)
    for layout in Layout:
        config = EngineConfig(num_ranks=3, layout=layout, max_batch_tokens=40, max_running=6, page_tokens=4)
        plan = random_plan(config, layout, np.random.default_rng(1), 1.0)
        for rank in range(3):
            tables = BlockTables(rank, 3, config.max_running, PAGES)
            tables.all_pages[:] = np.arange(config.max_running * PAGES, dtype=np.int32).reshape(-1, PAGES)
            builder = ArrayBuilder(config, rank, tables, Shapes(config, [6]), heads=heads, num_sms=7)
            step = builder.build(plan)
            empty = builder.padding(step.shape)
            sizes, of_empty = (
                {name: (array.shape, array.dtype) for name, array in built.arrays.items()} for built in (step, empty)
            )
            assert step.padded and sizes == of_empty
            assert set(PARTS) < set(sizes)
            assert asked[-2:] == [heads[rank] if layout is Layout.TP else 8] * 2
