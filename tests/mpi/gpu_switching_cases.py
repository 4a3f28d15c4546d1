"""What ranks of a long-lived MPI world do for tests/gpu/test_switching_gpu.py: serve a model on GPUs, rank 0 drives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan, StepResult
from splash_trt.request import FinishReason, Request, SamplingParams, TokenDelta
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.weights.dummy import DummyWeights
from splash_trt.weights.spec import partition
from splash_trt.worker import Worker, start_worker
from tests.mpi.gpu_world import on_gpus
from tests.switching.accounting import Rows, row_bytes, weight_bytes
from tests.switching.harness import MODEL, SEED, SETTINGS, TOUR, Told, memory_for, scatter
from tests.switching.test_bytes import difference, minimum

MAX_STEPS = 2000  # of one switch
KINDS = ("weights", "pages", "new_rows")

Found = dict[str, Any]
Drive = Callable[["Served"], Found]


class Served:
    """Rank 0's view of a model that all ranks serve. `plans` are all that were made."""

    def __init__(self, orchestrator: Orchestrator, config: EngineConfig) -> None:
        self.orchestrator = orchestrator
        self.scheduler = orchestrator.scheduler
        self.config = config
        self.plans: list[Plan] = []

    def add(self, count: int, prompt: int, output: int) -> list[str]:
        """Requests of that many tokens."""
        names = [f"n{len(self.plans):06d}.{i:03d}" for i in range(count)]
        for i, name in enumerate(names):
            sampling = SamplingParams(max_tokens=output, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
            ids = tuple((7 * i + 3 * k) % MODEL["vocab_size"] for k in range(prompt + i))
            self.orchestrator.add(Request(id=name, prompt=ids, sampling=sampling))
        return names

    def end(self, names: list[str]) -> None:
        for name in names:
            self.orchestrator.cancel(name)
        while not self.orchestrator.idle:
            self.orchestrator.step()

    def switch(self, target: Layout) -> None:
        self.scheduler.switch(target, "test")
        self.orchestrator.step()
        for _ in range(MAX_STEPS):
            if not self.scheduler.switcher.busy:
                return
            self.orchestrator.step()
        raise AssertionError(f"still {self.scheduler.switcher.state.value} after {MAX_STEPS} steps")

    def recorded(self) -> dict[str, int]:
        """Bytes by kind, of all switches so far."""
        records = self.scheduler.switcher.records
        return {kind: sum(record.bytes_between_ranks[kind] for record in records) for kind in KINDS}


def random_switches(world: World, folder: str, requests: list[dict[str, Any]], config: Found, seed: int) -> Found:
    """The requests come and end while the layout is changed at random, also in the midst of a switch."""

    def drive(served: Served) -> Found:
        orchestrator, scheduler, dice = served.orchestrator, served.scheduler, random.Random(seed)
        waiting = [msgspec.convert(request, Request) for request in requests]
        told: dict[str, list[int]] = {request.id: [] for request in waiting}
        while waiting or not orchestrator.idle:
            if waiting and scheduler.num_running + scheduler.num_waiting < 8:
                orchestrator.add(waiting.pop(0))
            if waiting and dice.random() < (0.02 if scheduler.switcher.busy else 0.4):
                scheduler.switch(dice.choice(list(Layout)), "test")
            for delta in orchestrator.step():
                told[delta.request_id] += delta.tokens
            scheduler.directory.check()
        pairs = [[r.source, r.target] for r in scheduler.switcher.records if r.outcome == "committed"]
        return {"told": told, "pairs": pairs, "recorded": served.recorded()}

    return serve(world, Path(folder), config, 60, drive)


def in_layouts(
    world: World, folder: str, requests: list[dict[str, Any]], config: Found, pages: int, layouts: list[str]
) -> Found:
    """The requests are served under each of the layouts, one after another; see `told_in`."""
    return serve(world, Path(folder), config, pages, lambda served: told_in(served, requests, layouts))


def beside_bad_ones(
    world: World,
    folder: str,
    requests: list[dict[str, Any]],
    config: Found,
    bad_id: int,
    bad: float,
    layouts: list[str],
) -> Found:
    """`in_layouts` of a model in which the hidden state of bad_id begins as `bad`."""

    def spoil(worker: Worker) -> None:
        table = worker.runner.weights.own["embed"]
        first, end = partition(MODEL["vocab_size"], world.size)[world.rank]
        if first <= bad_id < end:
            table[bad_id - first] = bad

    return serve(world, Path(folder), config, 120, lambda served: told_in(served, requests, layouts), prepare=spoil)


def told_in(served: Served, requests: list[dict[str, Any]], layouts: list[str]) -> Found:
    """By layout and request: its tokens, and the log-probabilities of the prompt's from the second on and of these."""
    orchestrator, found = served.orchestrator, dict[str, dict[str, Told]]()
    for name in layouts:
        if served.scheduler.layout is not Layout.parse(name):
            served.switch(Layout.parse(name))
        told = found[name] = {str(request["id"]): Told() for request in requests}
        for request in requests:
            orchestrator.add(msgspec.convert(request, Request))
        while not orchestrator.idle:
            for delta in orchestrator.step():
                told[delta.request_id].logprobs += [entry.logprob for entry in delta.prompt_logprobs]
                told[delta.request_id].take(delta)
    return {name: {i: [t.tokens, t.logprobs] for i, t in told.items()} for name, told in found.items()}


def compacting(world: World, folder: str, requests: list[dict[str, Any]], config: Found) -> Found:
    """TP to DP with 60 % of all pages live, wherever; see `told_in_compaction`."""
    return serve(world, Path(folder), config, 60, lambda served: told_in_compaction(served, requests))


class Asked:
    """What tests/switching/harness.py's `scatter` asks a server for."""

    def __init__(self, served: Served) -> None:
        self.orchestrator, self.scheduler = served.orchestrator, served.scheduler
        self.told: dict[str, Told] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.orchestrator.add(request)
            self.told[request.id] = Told()

    def cancel(self, request_id: str) -> None:
        self._take(self.orchestrator.cancel(request_id))

    def step(self) -> None:
        self._take(self.orchestrator.step())

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.told[delta.request_id].take(delta)


def told_in_compaction(served: Served, requests: list[dict[str, Any]]) -> Found:
    """Tokens of the requests, those of them that were not cancelled, bytes moved inside ranks, and how many places of
    a target table one plan told twice: as a page of the layout to come, and as one that was moved."""
    asked: Any = Asked(served)
    scatter(asked, [msgspec.convert(request, Request) for request in requests], SEED)
    while served.scheduler.directory.leaving_pages().any():
        asked.step()
    seen = len(served.plans)
    served.scheduler.switch(Layout.DP, "test")
    while not served.orchestrator.idle:
        asked.step()
    (record,) = served.scheduler.switcher.records
    assert record.outcome == "committed", record
    targets = [plan.target_tables[:, :3] for plan in served.plans[seen:]]
    return {
        "told": {i: told.tokens for i, told in asked.told.items()},
        "ended": [i for i, told in asked.told.items() if told.finish is not FinishReason.CANCELLED],
        "inside": record.bytes_inside_ranks,
        "twice": sum(len(places) - len(np.unique(places, axis=0)) for places in targets),
    }


def tour_of_least_bytes(world: World, folder: str, config: Found) -> Found:
    """Rank 0: (bytes of heads, of rows) that each of the 12 switches had to send and did send."""

    def drive(served: Served) -> Found:
        names, rows, seen = served.add(5, 20, 900), Rows(served.config), 0
        view: Any = SimpleNamespace(scheduler=served.scheduler, plans=served.plans)
        found = []
        for number, (source, target) in enumerate(itertools.pairwise(TOUR)):
            for _ in range(3):
                served.orchestrator.step()
            if number % 4 == 2:
                names += served.add(1, 40, 900)
            for plan in served.plans[seen:]:
                rows.take(plan)
            seen, before = len(served.plans), served.recorded()
            served.switch(target)
            least = minimum(view, rows, seen) * row_bytes(MODEL) // 2  # accounting.py has float64's sizes
            heads = weight_bytes(source, target, MODEL, world.size) // 2
            sent = difference(served.recorded(), before)
            found.append([heads, least, sent["weights"], sent["pages"] + sent["new_rows"]])
            seen = len(served.plans)
        served.end(names)
        return {"bytes": found, "recorded": served.recorded()}

    return serve(world, Path(folder), {**config, "dtype": "float32"}, 420, drive)


def switch_often(world: World, folder: str, switches: int) -> Found:
    """As many switches under load. On every rank: what is in use after a third of them, and at the end."""
    used: dict[int, dict[str, int]] = {}

    def drive(served: Served) -> Found:
        names: list[str] = []
        for target in itertools.islice(itertools.cycle(TOUR[1:]), switches):
            if served.scheduler.num_running < 4:
                names += served.add(4, 30, 60)
            served.switch(target)
        served.end(names)
        return {"outcomes": sorted({record.outcome for record in served.scheduler.switcher.records})}

    def look(plan: Plan) -> None:
        if plan.epoch in (switches // 3, switches) and plan.epoch not in used:
            used[plan.epoch] = in_use()

    found = serve(world, Path(folder), {"dtype": "float32"}, 200, drive, look)
    return found | {"used": [used[epoch] for epoch in sorted(used)]}


def serve(
    world: World,
    folder: Path,
    config: Found,
    pages: int,
    drive: Drive,
    look: Callable[[Plan], None] | None = None,
    prepare: Callable[[Worker], None] | None = None,
) -> Found:
    """drive(Served) on rank 0 while the others follow. Its result there, with `sent` by kind on all ranks.

    look: called on every rank with each plan, before it is launched. prepare: called on every rank before the first.
    """
    from mpi4py import MPI  # makes a rank of the process that imports it

    torch.set_num_threads(1)
    gpus: Any = on_gpus(world)
    model = load_config(folder)
    sizes = {"num_ranks": world.size, **SETTINGS, "run_on": "gpu", **config}
    sizes["layout"] = Layout.parse(config.get("layout", "tp"))
    engine = EngineConfig(memory_bytes=memory_for(folder, pages, **sizes), **sizes)
    source = Checkpoint(folder, model) if (folder / "model.safetensors").exists() else DummyWeights(model, SEED)
    worker = start_worker(gpus, model, engine, source)
    if prepare is not None:
        prepare(worker)
    launch = worker.runner.launch

    def looked(plan: Plan) -> Callable[[], StepResult]:
        if look is not None:
            look(plan)
        return launch(plan)

    worker.runner.launch = looked  # type: ignore[method-assign]
    found: Found = {}
    if world.rank:
        worker.follow()
    else:
        found = driven(Served(Orchestrator.of(model, engine, worker), engine), drive)
        world.control.send_object(None)
    found["sent"] = dict(worker.runner._mover.bytes_sent)
    worker.runner.close()
    torch.cuda.synchronize()
    MPI.COMM_WORLD.Barrier()
    gpus.collectives.close()
    return found


def driven(served: Served, drive: Drive) -> Found:
    """drive(served), while `served` notes all plans."""
    schedule = served.scheduler.schedule

    def recorded(now: float = 0.0) -> Plan | None:
        plan = schedule(now)
        if plan is not None:
            served.plans.append(plan)
        return plan

    with patch.object(served.scheduler, "schedule", recorded):
        found = drive(served)
    served.scheduler.check_idle()
    return found


def in_use() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {"gpu": total - free, "torch": torch.cuda.memory_reserved(), "rss": psutil.Process().memory_info().rss}
