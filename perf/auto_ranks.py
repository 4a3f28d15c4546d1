"""One rank's program of perf/auto.py, which starts it under mpirun.

Every run is a deployment of its own, which starts in its fixed layout, or for auto in TP. Arguments: a JSON file with
Settings, and the file to which rank 0 writes its Findings.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from perf import harness
from splash_trt.calibrate.run import calibrate
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.launch import run_under_mpi
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator, cost_policy, scheduler_of
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, SamplingParams
from splash_trt.scheduler.compare import Objective
from splash_trt.scheduler.device import Device
from splash_trt.scheduler.devices import parse_device
from splash_trt.simulate.generators import reasoning, rollouts
from splash_trt.simulate.source import TraceSource
from splash_trt.simulate.traces import Trace, joined
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.worker import start_worker

MODEL = harness.ROOT / "models" / "splash-tiny"
AUTO = "auto"
LABELS = (AUTO, *(layout.name.lower() for layout in Layout))
MAX_TOKENS = 1024  # the max_tokens of clients that do not know how long answers get


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    ranks: int
    dtype: str
    repeats: int
    size: float
    """Scales the loads' output lengths."""
    minutes: float
    """How long calibration takes."""
    device: dict[str, Any] | None
    """A description from an earlier calibration, to be used instead of calibrating."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    seconds: dict[str, dict[str, list[float]]]
    """Time to the last token of all, in each round; by load and label."""
    latency_s: dict[str, dict[str, list[float]]]
    """Time from a request's arrival to its last token, the mean over requests, in each round; by load and label."""
    changes: dict[str, list[str]]
    """Auto's changes of layout in each round, with their reasons; by load."""
    tokens: dict[str, int]
    """Output tokens, by load; a run with another number fails."""
    device: dict[str, Any]


def loads(size: float) -> dict[str, Trace]:
    """A burst that ends in a long tail, and a few clients followed by a crowd with long prompts. Always the same."""
    rng = np.random.default_rng(7)
    burst = rollouts(
        rng, prompts=8, samples=8, prompt_tokens=128, output_median=round(60 * size), output_sigma=0.9, output_max=600
    )
    few = reasoning(rng, requests=2, clients=1, prompt_tokens=64, output_median=round(150 * size), output_sigma=0.2)
    crowd = rollouts(rng, prompts=24, samples=1, prompt_tokens=500, output_median=round(100 * size), output_sigma=0.3)
    return {"burst_and_tail": burst, "few_then_crowd": joined("few_then_crowd", [few, crowd], in_turn=True)}


class Endings:
    """Stands between rank 0's orchestrator and the ranks: replaces sampled ids, so that each request ends by an
    end-of-text token after as many tokens as the load says, whatever the model samples. So every run has the same work,
    and the scheduler does not know how much that is."""

    def __init__(self, send: Callable[[Plan], Callable[[], StepResult]], load: Trace, slots: int, eos: int) -> None:
        self._send = send
        self._last = load.prompt_tokens + load.output_tokens - 1  # [requests], tokens computed when the last is sampled
        self._final = np.zeros(slots, np.int64)
        self._eos = eos

    def execute(self, plan: Plan) -> Callable[[], StepResult]:
        if len(plan.sampling):  # a request's seed is its number
            self._final[plan.sampling["slot"]] = self._last[plan.sampling["seed"]]
        row = np.searchsorted(np.cumsum(plan.count), plan.want_index, side="right")
        final = plan.start[row] + plan.count[row] == self._final[plan.slot[row]]
        wait = self._send(plan)

        def result() -> StepResult:
            found = wait()
            token = np.where(found.token == self._eos, self._eos + 1, found.token)
            return msgspec.structs.replace(found, token=np.where(final, self._eos, token))

        return result


def serve(
    world: World, model: ModelConfig, config: EngineConfig, load: Trace, device: Device | None, auto: bool
) -> tuple[float, float, list[str]] | None:
    """One run, called on every rank; rank 0 gets (seconds, mean latency in seconds, the switches), the others None."""
    worker = start_worker(world, model, config, Checkpoint(MODEL, model))
    if device is None:
        worker.follow()
        return None
    scheduler = scheduler_of(model, config)
    endings = Endings(worker.send, load, config.max_running, model.eos_token_ids[0])
    policy = cost_policy(model, config, device, Objective()) if auto else None
    orchestrator = Orchestrator(scheduler, endings.execute, config.plans_in_flight, policy=policy, watch=world.watch)
    seconds, latency_s = _drive(orchestrator, load)
    scheduler.check_idle()
    world.control.send_object(None)
    return (
        seconds,
        latency_s,
        [f"{r.source} -> {r.target} at step {r.begin_step}: {r.why}" for r in scheduler.switcher.records],
    )


def _drive(orchestrator: Orchestrator, load: Trace) -> tuple[float, float]:
    source, begin = TraceSource(load), time.perf_counter()
    arrived, counts = np.zeros(load.num_requests), np.zeros(load.num_requests, np.int64)
    latency = np.zeros(load.num_requests)
    while True:
        now = time.perf_counter() - begin
        for _, number in source.due(now):
            arrived[number] = now
            orchestrator.add(_request(load, number))
        if orchestrator.idle:
            upcoming = source.next_s()
            if upcoming is None:
                break
            time.sleep(max(0.0, upcoming - now))
            continue
        for delta in orchestrator.step():
            number = int(delta.request_id)
            counts[number] += len(delta.tokens)
            if delta.finish is not None:
                now = time.perf_counter() - begin
                latency[number] = now - arrived[number]
                source.ended([number], now)
    seconds = time.perf_counter() - begin
    assert (counts == load.output_tokens).all(), "a request ended too early or too late"
    return seconds, float(latency.mean())


def _request(load: Trace, number: int) -> Request:
    length = int(load.prompt_tokens[number])
    prompt = tuple(2 + (7 * number + 13 * i) % 2000 for i in range(length))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=number)
    return Request(id=str(number), prompt=prompt, sampling=sampling)


def measure(world: World, settings: Settings) -> Findings | None:
    """Called on every rank; rank 0 gets the findings, the others None."""
    torch.set_num_threads(1)
    model = load_config(MODEL)
    device = _device(world, model, settings)
    base = EngineConfig(num_ranks=world.size, dtype=settings.dtype, max_running=128)
    variants: dict[str, Callable[[], list[float]]] = {}
    changes: dict[str, list[str]] = {}
    latency: dict[str, dict[str, list[float]]] = {}

    def run(name: str, load: Trace, label: str) -> list[float]:
        auto = label == AUTO
        layout, layouts = (Layout.TP, tuple(Layout)) if auto else (Layout.parse(label), ())
        config = dataclasses.replace(base, layout=layout, layouts=layouts)
        found = serve(world, model, config, load, device, auto)
        if found is None:
            return [0.0]
        print(f"{name}, {label}: {found[0]:.2f} s, {len(found[2])} switches", file=sys.stderr, flush=True)
        latency.setdefault(name, {}).setdefault(label, []).append(found[1])
        if auto:
            changes.setdefault(name, []).append("; ".join(found[2]))
        return [found[0]]

    made = loads(settings.size)
    for name, load in made.items():
        for label in LABELS:
            variants[f"{name} {label}"] = functools.partial(run, name, load, label)
    rounds = harness.interleave(variants, warmup=0, repeats=settings.repeats)
    if device is None:
        return None
    seconds = {name: {label: [r[0] for r in rounds[f"{name} {label}"]] for label in LABELS} for name in made}
    return Findings(
        seconds=seconds,
        latency_s=latency,
        changes=changes,
        tokens={name: int(load.output_tokens.sum()) for name, load in made.items()},
        device=dataclasses.asdict(device),
    )


def _device(world: World, model: ModelConfig, settings: Settings) -> Device | None:
    """The device's description on rank 0, which alone decides; None on others."""
    if settings.device is not None:
        return None if world.rank else parse_device(settings.device, "device")
    found = calibrate(
        world,
        model,
        Checkpoint(MODEL, model),
        dtype=settings.dtype,
        seconds=60 * settings.minutes,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return None if found is None else found.device


def main(given: Path, found: Path) -> None:
    settings = msgspec.json.decode(given.read_bytes(), type=Settings)

    def program(world: World) -> int:
        findings = measure(world, settings)
        if findings is not None:
            found.write_bytes(msgspec.json.encode(findings))
        return 0

    run_under_mpi(program, 300.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
