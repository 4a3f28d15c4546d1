"""Times cells on the ranks of a world: what every rank runs (Bench), and rank 0's rounds over the cells (measure)."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from splash_trt.calibrate.cells import MOVED_PAGES, Cell, Limits, PlanMaker
from splash_trt.calibrate.fit import Sample
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.layout.spec import Residency
from splash_trt.memory.arena import DTYPES
from splash_trt.memory.map import memory_map, page_bytes
from splash_trt.models.config import ModelConfig
from splash_trt.plan import Plan
from splash_trt.scheduler.batch import Batch
from splash_trt.weights.source import WeightSource
from splash_trt.worker import Worker, start_worker

STEPS = 3  # that a visit of a cell times
LONG_S = 0.3  # if a step takes longer, the visit ends with it (on CPUs)
MIN_CELLS = 16
REFERENCE_ROWS = ((31, 1, 0), (31, 1, 0))  # two requests of one page each
TELL_S = 5.0  # between two reports of progress
MOST_SHARE = 0.99  # that is reported before all is done
PRODUCT_SIZE = 384

Progress = Callable[[str], None]


def calibration_config(
    model: ModelConfig,
    *,
    num_ranks: int,
    dtype: str,
    limits: Limits,
    layouts: tuple[Layout, ...] = tuple(Layout),
    run_on: str = "cpu",
    simulate_routing: str = "",
    experts_cut: str = "whole",
) -> EngineConfig:
    """A configuration in which every rank has room for all heads (FULL residency) and for the limits' cache tokens."""
    config = EngineConfig(
        num_ranks=num_ranks,
        run_on=run_on,
        simulate_routing=simulate_routing,
        experts_cut=experts_cut,
        layout=Layout.DP,
        layouts=layouts,
        dtype=dtype,
        max_running=limits.requests,
        max_batch_tokens=max(limits.tokens, limits.requests),
        step_deadline_s=300.0,
    )
    pages = -(-limits.cache_tokens // config.page_tokens) + 2 * max(MOVED_PAGES) + 1
    maps = [memory_map(model, config, rank) for rank in range(num_ranks)]
    need = max(m.workspace_bytes + m.own_bytes + m.others_bytes + pages * m.page_bytes for m in maps)
    return dataclasses.replace(config, memory_bytes=need + 4096)


class Bench:
    """A model on this rank, with a cache full of random rows. Rank 0 measures while the others `follow`.

    clock: in seconds. For ranks that are threads, one of which runs at a time, it may be the process's CPU time.
    """

    def __init__(
        self,
        world: World,
        model: ModelConfig,
        config: EngineConfig,
        source: WeightSource,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._worker: Worker = start_worker(world, model, config, source)
        self._config = config
        self._model = model
        self._maker = PlanMaker(config, model.vocab_size)
        # Random, since real rows are finite and differ. The last pages are not used: heads are in their place.
        usable = memory_map(model, config, world.rank).num_pages(Residency.FULL)
        pages = self._worker.runner.storage.pages[:usable]
        pages.normal_(generator=torch.Generator(pages.device).manual_seed(1))

    def follow(self) -> None:
        """Ranks other than 0: execute plans until rank 0 calls `release`."""
        self._worker.follow()
        self._worker.runner.close()

    def release(self) -> None:
        self._worker.world.control.send_object(None)
        self._worker.runner.close()

    def visit(self, cell: Cell) -> tuple[Batch, list[float]]:
        """The cell's batch, and the seconds of each timed step: STEPS, or fewer if they are long."""
        plans = self._maker.plans(cell, STEPS + 1)
        first = next(plans)
        moved = 2 * cell.moved_pages * page_bytes(self._model, self._config)
        batch = Batch.of(first, self._config.num_ranks, moved_bytes=moved)
        timed = self._overlapped if self._config.run_on == "gpu" else self._one_by_one
        return batch, timed(first, plans)

    def _one_by_one(self, first: Plan, plans: Iterable[Plan]) -> list[float]:
        """Seconds of each step but the first, for runners that compute a step while they are given its plan."""
        self._worker.send(first)()
        times: list[float] = []
        for plan in plans:
            begin = self._clock()
            self._worker.send(plan)()
            times.append(self._clock() - begin)
            if times[-1] > LONG_S:
                break
        return times

    def _overlapped(self, first: Plan, plans: Iterable[Plan]) -> list[float]:
        """Seconds of each step but the first, for runners that only launch it. As in service, each step is launched
        before the result of the one before is taken; its time is that from one result to the next."""
        take, ends = self._worker.send(first), list[float]()
        for plan in plans:
            following = self._worker.send(plan)
            take()
            ends.append(self._clock())
            take = following
        take()
        ends.append(self._clock())
        return [end - begin for begin, end in itertools.pairwise(ends)]


def measure(bench: Bench, cells: Sequence[Cell], seconds: float, progress: Progress) -> list[Sample | None]:
    """Rank 0: the median time of each cell; None for cells that there was no time for. At least MIN_CELLS are visited.

    Rounds over the cells go on until `seconds` are over. Each round has another order, so that other work on the
    machine affects all cells alike, and a first round that is cut short leaves out cells at random. Before and after
    each visit, the same reference cell is visited, and a visit's times are taken as multiples of the reference's: the
    speed of a shared machine varies over time by more than the differences to be measured. The first visit is dropped.
    """
    order, source = list(range(len(cells))), random.Random(1)
    times: list[list[float]] = [[] for _ in cells]
    batches: list[Batch | None] = [None] * len(cells)
    reference = Cell(layout=cells[0].layout, rows=REFERENCE_ROWS)
    bench.visit(reference)
    before = bench.visit(reference)[1]
    all_references = list(before)
    begin = reported = time.monotonic()
    visits = 0
    while visits < MIN_CELLS or time.monotonic() - begin < seconds:
        if visits % len(cells) == 0:
            source.shuffle(order)
        index = order[visits % len(cells)]
        batches[index], found = bench.visit(cells[index])
        after = bench.visit(reference)[1]
        times[index] += [t / float(np.median([*before, *after])) for t in found]
        all_references += after
        before = after
        visits += 1
        now = time.monotonic()
        if now - reported > TELL_S:
            reported = now
            share = min(visits / MIN_CELLS, (now - begin) / seconds if seconds else 1.0, MOST_SHARE)
            progress(f"{share:.0%}: {visits} visits of {len(cells)} steps")
    unit = float(np.median(all_references))
    return [
        None if batch is None else Sample(batch, unit * float(np.median(found)))
        for batch, found in zip(batches, times, strict=True)
    ]


def product_rate(dtype: str) -> float:
    """Floating-point operations per second of one rank's matrix products in `dtype`: the best seen within 0.2 s."""
    a = torch.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=DTYPES[dtype])
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * PRODUCT_SIZE**3 / best
