"""How often tokens after a switch differ from those without the switch, and how near to a tie those were.

    mpirun -n 2 python -m perf.near_ties --run-on gpu

Layouts add the same numbers in different orders. If two tokens' logits are closer than that rounding, greedy decoding
may go on with either. For every pair of layouts, the demo model answers the same requests once under the first layout
alone and once with a switch to the second; answers are compared from the switch's commit to each request's first
difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass, field

import torch

from perf.harness import ROOT
from splash_trt.config import RUN_ON_WISHES, EngineConfig, Layout
from splash_trt.dist.place import run_on_of
from splash_trt.dist.world import World
from splash_trt.launch import run_under_mpi
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Request, SamplingParams, TokenDelta
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.worker import start_worker

MODEL = ROOT / "models" / "splash-tiny"
TEXTS = ROOT / "tests" / "data" / "splash_tiny_continuations.json"
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, float("inf"))
"""The bounds of the classes that gaps are counted in, in nats."""
FIRST = 8
"""How many tokens after a commit are counted as the first ones."""


@dataclass
class Told:
    """A request's answer: its tokens; at each, the gap of the two best tokens (natural logarithm of the ratio of their
    probabilities); and how many tokens it had before the commit."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    before: int = 0

    def take(self, delta: TokenDelta) -> None:
        self.tokens += delta.tokens
        self.gaps += [entry.top[0][1] - entry.top[1][1] for entry in delta.logprobs]


@dataclass
class Compared:
    """gaps: at all compared tokens. differing: (tokens after the commit, gap) at each request's first difference.
    too_early: requests that differ before the commit, which a switch cannot explain."""

    requests: int = 0
    too_early: int = 0
    gaps: list[float] = field(default_factory=list)
    differing: list[tuple[int, float]] = field(default_factory=list)

    def add(self, plain: Told, switched: Told) -> None:
        self.requests += 1
        if plain.tokens[: switched.before] != switched.tokens[: switched.before]:
            self.too_early += 1
            return
        for i in range(switched.before, len(plain.tokens)):
            self.gaps.append(plain.gaps[i])
            if plain.tokens[i] != switched.tokens[i]:
                self.differing.append((i - switched.before, plain.gaps[i]))
                return


def prompts() -> list[tuple[int, ...]]:
    """Beginnings, of several lengths, of texts like those that the demo model was made for."""
    texts = [text["prompt_ids"] + text["continuation_ids"] for text in json.loads(TEXTS.read_text())]
    return [tuple(text[:length]) for text in texts for length in (6, 13, len(text))]


def run(orchestrator: Orchestrator, source: Layout, target: Layout | None, length: int, at: int) -> list[Told]:
    """Answers all prompts under `source`. A switch to `target`, if any, begins when each answer has `at` tokens."""
    scheduler = orchestrator.scheduler
    if scheduler.layout is not source:
        scheduler.switch(source, "next pair")
        while scheduler.switcher.busy or not orchestrator.idle:
            orchestrator.step()
    wish = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2)
    told = {f"{i:03d}": Told() for i in range(len(prompts()))}
    for name, prompt in zip(told, prompts(), strict=True):
        orchestrator.add(Request(id=name, prompt=prompt, sampling=wish))
    while not orchestrator.idle:
        if target is not None and min(len(t.tokens) for t in told.values()) >= at:
            scheduler.switch(target, "compared")
            target = None
        was = scheduler.layout
        for delta in orchestrator.step():
            told[delta.request_id].take(delta)
        if scheduler.layout is not was:  # committed; tokens of plans that were sent before still come in
            for request in told.values():
                request.before = len(request.tokens)
    return list(told.values())


def measure(orchestrator: Orchestrator, length: int, at: int) -> dict[tuple[str, str], Compared]:
    plain = {layout: run(orchestrator, layout, None, length, at) for layout in Layout}
    found = {}
    for source, target in itertools.permutations(Layout, 2):
        compared = found[source.name.lower(), target.name.lower()] = Compared()
        for one, other in zip(plain[source], run(orchestrator, source, target, length, at), strict=True):
            assert 0 < other.before < length, "the switch did not come while requests were decoded"
            compared.add(one, other)
    return found


def report(found: dict[tuple[str, str], Compared]) -> None:
    names = ("requests", "tokens", "differ", f"first {FIRST}", "per 1000", "largest gap", "too early")
    print(f"{'switch':>10}", *(f"{name:>11}" for name in names))
    for (source, target), c in found.items():
        early = sum(distance < FIRST for distance, _ in c.differing)
        largest = max((gap for _, gap in c.differing), default=0.0)
        rate = 1000 * len(c.differing) / max(len(c.gaps), 1)
        cells = (c.requests, len(c.gaps), len(c.differing), early, f"{rate:.2f}", f"{largest:.3f}", c.too_early)
        print(f"{source + '-' + target:>10}", *(f"{cell:>11}" for cell in cells))
    gaps = torch.tensor([gap for c in found.values() for gap in c.gaps])
    differing = torch.tensor([gap for c in found.values() for _, gap in c.differing])
    print("\ngap of the two best, nats: tokens, of them others after the switch")
    for low, high in itertools.pairwise(EDGES):
        tokens, others = (int(((x >= low) & (x < high)).sum()) for x in (gaps, differing))
        print(f"{low:6.2f} to {high:5.2f}: {tokens:7} {others:6}  {100 * others / max(tokens, 1):6.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-on", default="auto", choices=RUN_ON_WISHES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--at", type=int, default=8, help="tokens that each answer has when the switch begins")
    given = parser.parse_args()

    def program(world: World) -> int:
        torch.set_num_threads(1)
        model = load_config(MODEL)
        config = EngineConfig(
            num_ranks=world.size,
            layout=Layout.TP,
            layouts=tuple(Layout),
            dtype=given.dtype,
            memory_bytes=128 << 20,
            max_running=len(prompts()),
            run_on=run_on_of(world),
        )
        worker = start_worker(world, model, config, Checkpoint(MODEL, model))
        if world.rank:
            worker.follow()
        else:
            report(measure(Orchestrator.of(model, config, worker), given.length, given.at))
            world.control.send_object(None)
        worker.runner.close()
        return 0

    run_under_mpi(program, deadline_s=300.0, run_on=given.run_on)


if __name__ == "__main__":
    main()
