"""What ranks of a long-lived MPI world do for test_switching_mpi.py: serve a model, rank 0 in charge."""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]
import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Request, SamplingParams
from splash_trt.weights.dummy import DummyWeights
from splash_trt.worker import Worker, start_worker
from tests.switching.harness import SEED, SETTINGS, TOUR, Told, memory_for, write_model

MAX_STEPS = 500  # of one switch


def tour_under_load(world: World, requests: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """All 12 switches while the requests come, run and end. Rank 0: what was told, and the switches' records."""

    def drive(orchestrator: Orchestrator) -> dict[str, Any]:
        waiting = [msgspec.convert(request, Request) for request in requests]
        told = {request.id: Told() for request in waiting}
        records = []

        def step() -> None:
            if waiting and orchestrator.scheduler.num_running + orchestrator.scheduler.num_waiting < 8:
                orchestrator.add(waiting.pop(0))
            for delta in orchestrator.step():
                told[delta.request_id].take(delta)
            orchestrator.scheduler.directory.check()

        for target in TOUR[1:]:
            records.append(_switch(orchestrator, target, step))
        while waiting or not orchestrator.idle:
            step()
        return {
            "told": {key: [value.tokens, value.logprobs] for key, value in told.items()},
            "records": records,
        }

    return _serve(world, config, drive)


def switch_often(world: World, switches: int) -> dict[str, Any]:
    """As many switches under load. On every rank: threads, communicators and resident bytes, early and at the end."""
    probe = Probe()

    def drive(orchestrator: Orchestrator) -> dict[str, Any]:
        number = 0

        def step() -> None:
            nonlocal number
            while orchestrator.scheduler.num_running + orchestrator.scheduler.num_waiting < 3:
                number += 1
                sampling = SamplingParams(max_tokens=8 + number % 5, temperature=0.0, ignore_eos=True)
                prompt = tuple((7 * number + i) % 256 for i in range(3 + 5 * (number % 4)))
                orchestrator.add(Request(id=f"load{number:06d}", prompt=prompt, sampling=sampling))
            orchestrator.step()

        outcomes = [_switch(orchestrator, TOUR[1 + i % 12], step)["outcome"] for i in range(switches)]
        for i in range(number + 1):
            orchestrator.cancel(f"load{i:06d}")
        while not orchestrator.idle:
            orchestrator.step()
        return {"outcomes": sorted(set(outcomes))}

    found = _serve(world, {}, drive)
    return found | probe.changes()


class Probe:
    """What a process holds, before and after."""

    def __init__(self) -> None:
        self._before = self._now()

    def changes(self) -> dict[str, list[int]]:
        now = self._now()
        return {name: [value, now[name]] for name, value in self._before.items()}

    @staticmethod
    def _now() -> dict[str, int]:
        # A communicator's Fortran handle is the lowest free one, so that of a short-lived one counts the others.
        comm = importlib.import_module("mpi4py.MPI").COMM_WORLD.Dup()
        handle = comm.py2f()
        comm.Free()
        return {"communicators": handle, "threads": threading.active_count(), "rss": psutil.Process().memory_info().rss}


def _serve(world: World, config: dict[str, Any], drive: Callable[[Orchestrator], dict[str, Any]]) -> dict[str, Any]:
    """drive(orchestrator) on rank 0 while the others follow; its result, {} there."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name))
        sizes = {"num_ranks": world.size, "layout": TOUR[0], **SETTINGS, **config}
        sizes["layouts"] = tuple(Layout)
        memory = memory_for(folder, 40, **sizes)
        model, engine = load_config(folder), EngineConfig(memory_bytes=memory, **sizes)
        worker: Worker = start_worker(world, model, engine, DummyWeights(model, SEED))
    if world.rank:
        worker.follow()
        return {}
    orchestrator = Orchestrator.of(model, engine, worker)
    found = drive(orchestrator)
    orchestrator.scheduler.check_idle()
    world.control.send_object(None)
    return found


def _switch(orchestrator: Orchestrator, target: Layout, step: Callable[[], None]) -> dict[str, Any]:
    scheduler = orchestrator.scheduler
    scheduler.switch(target, "test")
    step()
    for _ in range(MAX_STEPS):
        if not scheduler.switcher.busy:
            record = scheduler.switcher.records[-1]
            living = scheduler.num_running + scheduler.num_waiting
            return {"pair": [record.source, record.target], "outcome": record.outcome, "living": living}
        step()
    raise AssertionError(f"still {scheduler.switcher.state.value} after {MAX_STEPS} steps")
