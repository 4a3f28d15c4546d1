"""A whole server on thread ranks that switches layouts while it answers, whatever engine its runners make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splash_trt.config import Layout
from splash_trt.llm import LLM
from splash_trt.request import Request, SamplingParams, TokenLogprob

PATIENCE = 2000  # steps


@dataclasses.dataclass
class Told:
    """What one request was told; entries has each token's log-probability and those of the two likeliest."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    entries: list[TokenLogprob] = dataclasses.field(default_factory=list)
    done: bool = False


def requests(prompts: Sequence[Sequence[int]], max_tokens: int, sampled: bool = False) -> list[Request]:
    """Greedy ones, or drawn ones."""
    kind: dict[str, Any] = {"temperature": 1.0} if sampled else {"temperature": 0.0}
    return [
        Request(
            id=f"{'drawn' if sampled else 'greedy'}{i}",
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=5, seed=i, **kind),
        )
        for i, prompt in enumerate(prompts)
    ]


def serve(
    folder: Path, asked: Sequence[Request], *, ranks: int, tour: Sequence[Layout], dtype: str, between: int = 2,
    **config: Any,
) -> dict[str, Told]:  # fmt: skip
    """Answer `asked`, going through the layouts of `tour`: the first, then a switch `between` steps after each.

    Requests are added in the course of the tour, so that some are prefilled in each layout.
    """
    told = {request.id: Told() for request in asked}
    settings: dict[str, Any] = {
        "memory_bytes": 64 << 20, "page_tokens": 8, "max_running": 8, "max_batch_tokens": 40,
        "context_block_tokens": 24, "migration_bytes": 1 << 22, "layouts": tuple(Layout) if len(tour) > 1 else (),
    }  # fmt: skip
    with LLM(folder, ranks=ranks, layout=tour[0].name, dtype=dtype, **settings, **config) as llm:
        orchestrator = llm.orchestrator
        assert orchestrator is not None
        scheduler = orchestrator.scheduler
        waiting, coming = list(asked), list(tour[1:])

        def step() -> None:
            for delta in orchestrator.step():
                mine = told[delta.request_id]
                mine.tokens += delta.tokens
                mine.entries += delta.logprobs
                mine.done = delta.finish is not None

        share = -(-len(waiting) // len(tour))
        for _ in range(PATIENCE):
            if not scheduler.switcher.busy and (waiting or coming):
                for _ in range(min(share, len(waiting))):
                    orchestrator.add(waiting.pop(0))
                for _ in range(between):
                    step()
                if coming:
                    scheduler.switch(coming.pop(0), "test")
            if orchestrator.idle and not waiting and not coming:
                break
            step()
        assert all(mine.done for mine in told.values()) and not coming
        done = [record.target for record in scheduler.switcher.records if record.outcome == "committed"]
        assert done == [layout.name.lower() for layout in tour[1:]]
        scheduler.check_idle()
    return told


def first_differences(got: dict[str, Told], want: dict[str, Told]) -> list[tuple[str, int, float]]:
    """(request, position, gap) where tokens first differ: how far the wanted token was ahead of the other one."""
    found = []
    for request_id, mine in got.items():
        theirs = want[request_id]
        assert len(mine.tokens) == len(theirs.tokens)
        for position, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
            if a != b:
                top = dict(theirs.entries[position].top)
                found.append((request_id, position, theirs.entries[position].logprob - top.get(a, float("-inf"))))
                break
    return found


def worst_logprob(got: dict[str, Told], want: dict[str, Told]) -> float:
    """The largest difference of a token's log-probability, up to where the tokens differ."""
    worst = 0.0
    for request_id, mine in got.items():
        for a, b in zip(mine.entries, want[request_id].entries, strict=True):
            if a.token != b.token:
                break
            worst = max(worst, abs(a.logprob - b.logprob))
    return worst
