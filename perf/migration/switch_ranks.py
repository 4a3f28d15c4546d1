"""One rank's program of the switch benchmark; switches.py starts it under mpirun.

For each context and budget, rank 0 serves a steady batch of decodes and makes several tours of all 12 switches, all on
one deployment. Arguments: a JSON file with Settings, and the file to which rank 0 writes its Findings.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from perf.engines.bench import CONFIGS, model_folder
from perf.harness import Row
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.place import run_on_of
from splash_trt.dist.world import World
from splash_trt.launch import run_under_mpi
from splash_trt.layout.switch import Record
from splash_trt.memory.map import memory_map, model_sizes
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, SamplingParams
from splash_trt.weights.dummy import DummyWeights
from splash_trt.worker import start_worker

TOUR = tuple(Layout.parse(name) for name in "tp dp tp cp tp dop dp cp dp dop cp dop tp".split())
STATES = ("preparing", "migrating", "armed", "retiring")
KINDS = ("weights", "pages", "new_rows")
SEED = 1
WARMUP = 4  # steps after a switch that are not counted
FIRST_AROUND = 8  # most steps before each switch in the first tour, which is discarded
SWITCH_STEPS = 100  # the cache has room for so many steps of each switch


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    ranks: int
    run_on: str
    """As in EngineConfig."""
    model: str
    """The name of a folder in perf/configs, or the path of another folder."""
    dtype: str
    check_dtype: str
    simulate_routing: str
    """As in EngineConfig."""
    max_batch_tokens: int
    batch: int
    contexts: tuple[int, ...]
    """Tokens of each request's prompt."""
    budgets: tuple[int, ...]
    """Values of migration_bytes."""
    max_slowdown: float
    """migration_max_slowdown; if it is large, the budget never shrinks."""
    switch_deadline_s: float
    """As in EngineConfig."""
    rounds: int
    """Tours; the first one is discarded."""
    around: int
    """Steps without a switch before each switch, that it is compared with."""
    check: bool
    """Whether a tiny model's tokens are compared with and without switches."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[Row]
    """A row for each budget, context, pair and round."""
    slowdowns: list[float]
    """For each step with copies, in all switches: its time over what it would take without copies, less 1 (Watched)."""
    variations: list[float]
    """For each step before a switch: its time over the median of those steps, less 1."""
    switched: dict[str, list[int]]
    """The tokens of the check's run with a tour of switches, by request."""
    plain: dict[str, list[int]]
    """The tokens of the check's run without switches, by request."""


class Steps:
    """An Observer that keeps plans and results in `done`."""

    def __init__(self) -> None:
        self.done: list[tuple[Plan, StepResult]] = []

    def planned(self, plan: Plan | None, *_: object) -> None:
        """Nothing to keep."""

    def completed(self, plan: Plan, result: StepResult, *_: object) -> None:
        if plan.num_tokens:
            self.done.append((plan, result))

    def seconds(self, copies: bool) -> np.ndarray:
        """[n, 2]: numbers and seconds of steps with or without copies, by the ranks' clock (on GPUs the device's)."""
        found = [(plan.step, result.seconds) for plan, result in self.done if plan.copies is copies]
        return np.array(found).reshape(-1, 2)


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """The steps before a switch, and the steps of the switch that copied something.

    As contexts grow, each step takes some 0.01 % longer, which adds up to as much as is measured here. So a step with
    copies is compared with the steps before the switch plus what steps of that layout have grown by since; the growth
    is taken from all switches out of the same layout.
    """

    layout: str
    at: float
    """The mean of the numbers of the steps before."""
    step_s: float
    """The median time of those steps."""
    variations: list[float]
    """For each of those steps, its time over the median, less 1."""
    copying: list[tuple[float, float]]
    """(number, seconds) of each step that copied something."""

    def slowdowns(self, growth_s: float) -> list[float]:
        return [seconds / (self.step_s + growth_s * (step - self.at)) - 1 for step, seconds in self.copying]


def growth_s(layout: str, watched: list[Watched]) -> float:
    """By how many seconds a layout's steps become longer from one step to the next."""
    mine = [w for w in watched if w.layout == layout]
    return float(np.polyfit([w.at for w in mine], [w.step_s for w in mine], 1)[0]) if len(mine) > 1 else 0.0


def add_slowdowns(rows: list[Row], watched: list[Watched]) -> list[float]:
    """Adds slowdowns by the device's clock to the rows: medians for each switch, and 99th percentiles over all switches
    of a pair, since a single switch has few steps. Returns the slowdown of every step with copies."""
    slower = [seen.slowdowns(growth_s(seen.layout, watched)) for seen in watched]
    for row, mine in zip(rows, slower, strict=True):
        alike = [i for i, other in enumerate(rows) if other["pair"] == row["pair"]]
        copying = [slowdown for i in alike for slowdown in slower[i]]
        without = float(np.percentile([variation for i in alike for variation in watched[i].variations], 99))
        row["device_slowdown"] = median(mine) if mine else None
        row["device_variation_p99"] = without
        row["device_slowdown_p99"] = (1 + float(np.percentile(copying, 99))) / (1 + without) - 1 if copying else None
    return [slowdown for mine in slower for slowdown in mine]


class Served:
    """A model on all ranks. Rank 0's `orchestrator` drives it; other ranks execute plans inside the constructor."""

    def __init__(self, world: World, folder: Path, *, cache_tokens: int, **config: Any) -> None:
        self.model = load_config(folder)
        shape: dict[str, Any] = {"num_ranks": world.size, "layouts": tuple(Layout)}
        shape |= {"switch_hold_s": 60.0, "step_deadline_s": 300.0}
        sized = EngineConfig(memory_bytes=1, **shape, **config)
        maps = [memory_map(self.model, sized, rank) for rank in range(world.size)]
        pages = -(-cache_tokens // sized.page_tokens) + 3 * sized.max_running
        need = max(m.pages_offset + m.others_bytes + pages * m.page_bytes for m in maps) + 255
        engine = EngineConfig(memory_bytes=need, **shape, **config)
        self.sizes = model_sizes(self.model, engine)
        self._world = world
        worker = start_worker(world, self.model, engine, DummyWeights(self.model, SEED))
        self._runner = worker.runner
        if world.rank:
            worker.follow()
            self._runner.close()
        else:
            self.orchestrator = Orchestrator.of(self.model, engine, worker)
            self.steps = self.orchestrator.observer = Steps()

    def release(self) -> None:
        """For rank 0, when all is done: the others' constructors return."""
        self.orchestrator.scheduler.check_idle()
        self._world.control.send_object(None)
        self._runner.close()


def measure(world: World, settings: Settings) -> Findings:
    """Called on every rank; only rank 0's findings count."""
    torch.set_num_threads(1)
    runs = [_check(world, switching, settings) for switching in (True, False)] if settings.check else [{}, {}]
    rows: list[Row] = []
    slowdowns: list[float] = []
    variations: list[float] = []
    grown = len(TOUR) * settings.rounds * (WARMUP + settings.around + SWITCH_STEPS)
    served = Served(
        world,
        model_folder(settings.model),
        cache_tokens=settings.batch * (max(settings.contexts) + grown),
        run_on=run_on_of(world),
        capture_ahead=False,  # only few of the many shapes occur, all of them in the first tour
        simulate_routing=settings.simulate_routing,
        max_batch_tokens=settings.max_batch_tokens,
        dtype=settings.dtype,
        max_running=settings.batch,
        migration_max_slowdown=settings.max_slowdown,
        switch_deadline_s=settings.switch_deadline_s,
    )
    if world.rank == 0:
        for budget, context in itertools.product(settings.budgets, settings.contexts):
            served.orchestrator.scheduler.switcher.begin_with(budget)
            found, watched = _tours(served, settings, context, budget)
            rows += found
            slower = add_slowdowns(found, watched)
            slowdowns += slower
            variations += [variation for seen in watched for variation in seen.variations]
        served.release()
    return Findings(rows=rows, slowdowns=slowdowns, variations=variations, switched=runs[0], plain=runs[1])


def _check(world: World, switching: bool, settings: Settings) -> dict[str, list[int]]:
    """Tokens of a tiny model's requests, with or without a tour of all switches meanwhile; on rank 0."""
    sizes: dict[str, Any] = {"dtype": settings.check_dtype, "page_tokens": 8, "max_running": 8, "max_batch_tokens": 32}
    sizes["run_on"] = run_on_of(world)
    # The budget does not change, so that the tour ends before the requests do.
    sizes |= {"migration_bytes": 40000, "migration_max_slowdown": 1000.0}
    served = Served(world, CONFIGS / "tiny", cache_tokens=4096, **sizes)
    told: dict[str, list[int]] = {}
    if world.rank:
        return told
    orchestrator = served.orchestrator
    for i, length in enumerate((1, 7, 8, 9, 33, 60, 17, 25)):
        wish = SamplingParams(max_tokens=250, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        prompt = tuple((7 * length + 13 * k) % served.model.vocab_size for k in range(length))
        orchestrator.add(Request(id=f"{i:04d}", prompt=prompt, sampling=wish))
        told[f"{i:04d}"] = []
    targets = list(TOUR[1:]) if switching else []
    while not orchestrator.idle:
        if targets and not orchestrator.scheduler.switcher.busy:
            orchestrator.scheduler.switch(targets.pop(0), "check")
        for delta in orchestrator.step():
            told[delta.request_id] += delta.tokens
    records = orchestrator.scheduler.switcher.records
    assert not targets and all(record.outcome == "committed" for record in records), records
    served.release()
    return told


def _tours(served: Served, settings: Settings, context: int, budget: int) -> tuple[list[Row], list[Watched]]:
    """Makes the tours for a context and a budget; returns a row and a Watched for every switch that counts."""
    orchestrator, random = served.orchestrator, np.random.default_rng(SEED)
    wish = SamplingParams(max_tokens=served.model.max_positions, ignore_eos=True)
    names = [f"{budget}.{context}.{i:04d}" for i in range(settings.batch)]
    for name in names:
        prompt = tuple(random.integers(0, served.model.vocab_size, context).tolist())
        orchestrator.add(Request(id=name, prompt=prompt, sampling=wish))
    while orchestrator.scheduler.num_waiting:
        orchestrator.step()
    rows: list[Row] = []
    watched: list[Watched] = []
    for tour in range(settings.rounds):
        for source, target in itertools.pairwise(TOUR):
            around = settings.around if tour else min(settings.around, FIRST_AROUND)
            found, seen = _switch(served, source, target, around)
            pair = f"{source.name.lower()}-{target.name.lower()}"
            _say(f"  {pair}: {found['device_step_ms']:.2f} ms, {found['migrating_steps']} steps, "
                 f"{found['rate_gb_s'] or 0:.2f} GB/s, stall {found['stall_ms']} ms, "
                 f"budget then {found['budget_mib']:.1f} MiB")  # fmt: skip
            if tour:
                cell = {"ranks": settings.ranks, "budget_kib": budget // 1024, "context": context}
                rows.append({**cell, "pair": pair, **found})
                watched.append(seen)
        _say(f"N={settings.ranks} budget {budget >> 10} KiB context {context}: tour {tour + 1} of {settings.rounds}")
    for name in names:
        orchestrator.cancel(name)
    while not orchestrator.idle:
        orchestrator.step()
    return rows, watched


def _switch(served: Served, source: Layout, target: Layout, around: int) -> tuple[Row, Watched]:
    """Measures one switch and `around` steps before it."""
    orchestrator, steps = served.orchestrator, served.steps
    switcher = orchestrator.scheduler.switcher
    for _ in range(WARMUP):
        orchestrator.step()
    steps.done.clear()
    plain = [_timed(orchestrator) for _ in range(around)]
    at, seconds = steps.seconds(copies=False).T
    orchestrator.scheduler.switch(target, "benchmark")
    during = [_timed(orchestrator)]
    while switcher.busy:
        during.append(_timed(orchestrator))
    record = switcher.records[-1]
    assert record.outcome == "committed" and record.target == target.name.lower(), record
    copying = [(step, taken) for step, taken in steps.seconds(copies=True).tolist()]
    base = float(np.median(seconds))
    varied = (seconds / base - 1).tolist()
    seen = Watched(layout=source.name, at=float(at.mean()), step_s=base, variations=varied, copying=copying)
    row = _row(record, plain, during) | {"device_step_ms": 1e3 * base, "rate_gb_s": _rate(served, steps)}
    return row | {"budget_mib": switcher.usual_bytes / 2**20}, seen


def _rate(served: Served, steps: Steps) -> float | None:
    """GB/s that a rank sends, on average over ranks, in steps that move pages or weights between ranks; None if there
    are none."""
    ranks, sent, seconds = len(served.sizes.heads), 0, 0.0
    for plan, result in steps.done:
        early = msgspec.structs.replace(plan, late_moves=plan.late_moves[:0])
        out = int(early.copied_bytes(ranks, served.sizes.row_bytes, served.sizes.itemsize)[0].sum())
        sent += out
        seconds += result.seconds if out else 0.0
    return sent / ranks / seconds / 1e9 if sent else None


def _timed(orchestrator: Orchestrator) -> float:
    begin = time.perf_counter()
    orchestrator.step()
    return time.perf_counter() - begin


def _row(record: Record, plain: list[float], during: list[float]) -> Row:
    """A switch's row. plain, during: seconds of turns before the switch, and of turns during it."""
    base = median(plain)
    row: Row = {f"{state}_ms": 1e3 * record.seconds_in.get(state, 0.0) for state in STATES}
    row |= {f"{state}_steps": record.steps_in.get(state, 0) for state in STATES}
    row |= {f"{kind}_bytes": record.bytes_between_ranks[kind] for kind in KINDS}
    row["inside_bytes"] = record.bytes_inside_ranks
    row["step_ms"] = 1e3 * base
    row["slowdown_median"] = median(during) / base - 1
    row["slowdown_p99"] = float(np.percentile(during, 99) / np.percentile(plain, 99) - 1)
    row["stall_ms"] = None if record.stall_s is None else 1e3 * record.stall_s
    return row


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Settings)
    out = Path(arguments[1])

    def program(world: World) -> int:
        findings = measure(world, settings)
        if world.rank == 0:
            out.write_bytes(msgspec.json.encode(findings))
        return 0

    run_under_mpi(program, deadline_s=300.0, run_on=settings.run_on)


if __name__ == "__main__":
    main(sys.argv[1:])
