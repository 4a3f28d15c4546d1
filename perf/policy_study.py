"""Simulates a load under every label and stores the results with the code's identity, for perf/policy.py and the tests.

Everything is simulated, so a case gives the same numbers on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from perf.harness import ROOT
from perf.policy_loads import DEPLOYMENTS, FIXED, LABELS, Deployment, adversary_numbers, deployment, is_open, load_of
from splash_trt.config import Layout
from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.generators import reasoning, rollouts
from splash_trt.simulate.outcome import AUTO, CEILING, Outcome
from splash_trt.simulate.traces import Trace, joined

CODE = ("scheduler", "simulate", "layout", "migration", "cache", "memory", "models", "config.py", "orchestrator.py")
"""The parts of splash_trt that a simulated run's numbers depend on."""
POLICY = ("policy.py", "compare.py", "estimator.py", "phases.py", "transition.py", "load.py")
"""The files of its scheduler that runs of fixed layouts do not depend on."""


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One load under one label: a fixed layout, auto, or the ceiling."""

    identity: str
    """A hash of the load and the code (identity())."""
    kind: str
    """"random", "adversary", or one of KINDS."""
    number: int
    size: float
    label: str
    makespan_s: float
    latency_s: float
    """From arrival to the last token, the mean over requests."""
    output_tokens: int
    steps: int
    recomputed: int
    load: str
    switches: list[str]
    """What auto did, one line for each switch."""
    cpu_s: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load under every label."""

    kind: str
    number: int
    runs: dict[str, Run]

    @property
    def where(self) -> Deployment:
        return deployment(self.kind, self.number)

    @property
    def metric(self) -> str:
        """What the load is judged by: latency for open arrivals, where the last request's end says little."""
        return "latency" if self.kind == "random" and is_open(self.number) else "makespan"

    def seconds(self, label: str) -> float:
        return self.runs[label].latency_s if self.metric == "latency" else self.runs[label].makespan_s

    @property
    def best(self) -> str:
        """The fixed layout that took least time."""
        return min(FIXED, key=self.seconds)

    @property
    def over_best(self) -> float:
        """Auto's time over that of the best fixed layout."""
        return self.seconds(AUTO) / self.seconds(self.best)

    @property
    def ceiling_share(self) -> float:
        """Auto's speed as a share of the ceiling's."""
        return self.seconds(CEILING) / self.seconds(AUTO)


Task = tuple[str, int, float, str]
"""(kind, number, size, label). An adversary reacts to auto's layouts, and other labels get what it sent then; so all
its labels are one task, "*"."""


def tasks_of(kind: str, number: int, size: float) -> list[Task]:
    labels = ("*",) if kind == "adversary" else LABELS
    return [(kind, number, size, label) for label in labels]


def solve(task: Task) -> list[Run]:
    """Simulates a task's runs."""
    kind, number, size, label = task
    where, begin = deployment(kind, number), time.process_time()
    load = load_of(kind, number, size)
    if isinstance(load, Adversary):
        outcomes: Sequence[Outcome] = where.compare(load).outcomes
        load = load.trace
    else:
        outcomes = [where.outcome(load, label)]
    notes = "; ".join(load.notes)
    cpu_s = (time.process_time() - begin) / len(outcomes)
    return [
        Run(
            identity=identity(kind, number, size, o.label),
            kind=kind,
            number=number,
            size=size,
            label=o.label,
            makespan_s=o.makespan_s,
            latency_s=float(o.latency_s.mean()),
            output_tokens=o.output_tokens,
            steps=o.steps,
            recomputed=o.recomputed,
            load=notes,
            switches=switch_lines(o) if o.label == AUTO else [],
            cpu_s=cpu_s,
        )
        for o in outcomes
    ]


def cases(
    wanted: Sequence[tuple[str, int]], size: float, state: Path, jobs: int, told: Callable[[Case], None]
) -> list[Case]:
    """The cases `wanted`, (kind, number) each. Runs of the same code and load that are in the file `state` are taken
    from there; new ones are appended to it as they end. jobs: how many processes work. told: called with each case that
    is completed."""
    runs: dict[tuple[str, int], dict[str, Run]] = {case: {} for case in wanted}
    for stored in state.read_bytes().splitlines() if state.exists() else []:
        run = msgspec.json.decode(stored, type=Run)
        case = run.kind, run.number
        if case in runs and run.identity == identity(run.kind, run.number, size, run.label):
            runs[case][run.label] = run
    tasks = [
        task
        for kind, number in wanted
        for task in tasks_of(kind, number, size)
        if task[-1] not in runs[kind, number] and len(runs[kind, number]) < len(LABELS)
    ]
    with state.open("ab") as file, multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for found in pool.imap_unordered(solve, tasks):
            file.writelines(msgspec.json.encode(run) + b"\n" for run in found)
            file.flush()
            case = found[0].kind, found[0].number
            runs[case] |= {run.label: run for run in found}
            if len(runs[case]) == len(LABELS):
                told(Case(kind=case[0], number=case[1], runs=runs[case]))
    return [Case(kind=kind, number=number, runs=runs[kind, number]) for kind, number in wanted]


def line(case: Case) -> str:
    times = ", ".join(f"{label} {case.seconds(label):.1f}" for label in LABELS)
    where, runs, switches = case.where, case.runs.values(), len(case.runs[AUTO].switches) - 1
    return (
        f"{case.kind} {case.number} ({where}), {case.metric} s: {times}; best {case.best}, auto/best "
        f"{case.over_best:.3f}, ceiling {case.ceiling_share:.3f}, {switches} switches, "
        f"{max(run.steps for run in runs)} steps, {sum(run.cpu_s for run in runs):.0f} CPU s"
    )


def switch_lines(auto: Outcome) -> list[str]:
    lines = []
    for r in auto.switches:
        seconds = sum(r.seconds_in.values())
        moved = sum(r.bytes_between_ranks.values()) / 1e9
        lines.append(
            f"step {r.begin_step}: {r.source} -> {r.target}, {r.outcome} after {seconds:.2f} s, {moved:.1f} GB: {r.why}"
        )
    changes = ", ".join(f"{time:.1f} s {Layout(layout).name.lower()}" for time, layout in auto.layout_changes[:60])
    return [*lines, f"layouts: {changes}"]


def identity(kind: str, number: int, size: float, label: str) -> str:
    """A hash of everything that a run's numbers depend on, code and load; stored runs with another one are not used."""
    return f"{_code(label == AUTO or kind == 'adversary')}-{_load(kind, number, size)}"


@functools.cache
def _code(policy: bool) -> str:
    """A hash of the code. policy: including the policy, which fixed layouts and the ceiling do not use; but what an
    adversary sends depends on it."""
    digest = hashlib.sha256()
    for name in CODE:
        path = ROOT / "splash_trt" / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if policy or file.name not in POLICY:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _load(kind: str, number: int, size: float) -> str:
    load = load_of(kind, number, size)
    digest = hashlib.sha256(f"{deployment(kind, number).base} {deployment(kind, number)}".encode())
    if isinstance(load, Adversary):
        digest.update(repr(adversary_numbers(number, size)).encode())
    else:
        for array in (load.arrival_s, load.prompt_tokens, load.output_tokens, load.after, load.wave):
            digest.update(array.tobytes())
    return digest.hexdigest()[:12]


def few_then_crowd() -> Trace:
    """A load of one client, then hundreds at once, for which auto changes the layout within seconds."""
    rng = np.random.default_rng(1)
    few = reasoning(rng, requests=2, clients=1, output_median=300, output_sigma=0.1)
    crowd = rollouts(rng, prompts=64, samples=8, prompt_tokens=256, output_median=250, output_sigma=0.1)
    return joined("few then crowd", [few, crowd], in_turn=True)


def same_twice() -> str:
    """The check: a load with changes of layout gives the same bytes when simulated twice. AssertionError if not."""
    load = few_then_crowd()
    runs = [DEPLOYMENTS[1].compare(load) for _ in range(2)]
    one, other = ([o.to_bytes() for o in run.outcomes] for run in runs)
    assert one == other, "two runs of the same load differ"
    tokens = {o.output_tokens for o in runs[0].outcomes}
    assert tokens == {int(load.output_tokens.sum())}, f"not every layout made all tokens: {tokens}"
    assert any(o.num_switches for o in runs[0].outcomes), "nothing changed the layout"
    return f"{len(one)} runs of {load.num_requests} requests were the same bytes twice; each made {tokens.pop()} tokens"
