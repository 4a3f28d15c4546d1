"""The check: the same requests in float64, once on four ranks with the same switches, once on one that never switches.

Runs as a child process, `python -m scripts.demo.check JOB.json RESULT.json`, which says on stdout how far it is.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from splash_trt.config import Layout
from splash_trt.llm import LLM
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Request

LEAD_TOKENS = 64  # a switch begins so much before the point where it was seen to be done

# What the two runs share. The sizes are small so that the switches come within chunks and pages, as on the server.
SIZES: dict[str, Any] = {"page_tokens": 16, "max_batch_tokens": 128, "max_running": 64, "memory_bytes": 192 << 20}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `then` is submitted when all of `first` are done."""

    model: str
    ranks: int
    first: list[Request]
    then: list[Request]
    switches: list[tuple[int, str]]
    """(tokens computed, layout to switch to by then), in order."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    tokens: dict[str, list[int]]
    """Output tokens by request id."""
    layouts: list[str]
    """The layouts that served, in order."""


def run(job: Job, on_tokens: Callable[[int], None]) -> Result:
    """All output tokens of the requests, in float64. on_tokens: called with the number of output tokens so far."""
    layouts = tuple(Layout) if job.switches else ()
    with LLM(job.model, ranks=job.ranks, layout="tp", layouts=layouts, dtype="float64", **SIZES) as llm:
        assert llm.orchestrator is not None
        return _drive(llm.orchestrator, job, on_tokens)


def _drive(orchestrator: Orchestrator, job: Job, on_tokens: Callable[[int], None]) -> Result:
    told: dict[str, list[int]] = {request.id: [] for request in (*job.first, *job.then)}
    switches, batches = deque(job.switches), deque([job.first, job.then])
    switcher = orchestrator.scheduler.switcher
    layouts, computed = [switcher.layout.name.lower()], 0
    while batches or not orchestrator.idle:
        if not orchestrator.scheduler.has_requests and batches:
            for request in batches.popleft():
                orchestrator.add(request)
        if switches and computed >= switches[0][0] - LEAD_TOKENS and not switcher.busy:
            orchestrator.scheduler.switch(Layout.parse(switches.popleft()[1]), "repeats what the server did")
        turn = orchestrator.turn()
        computed += turn.num_tokens
        for delta in turn.deltas:
            if delta.error is not None:
                raise RuntimeError(f"{delta.request_id}: {delta.error}")
            told[delta.request_id] += delta.tokens
        layout = switcher.layout.name.lower()
        if layout != layouts[-1]:
            layouts.append(layout)
        if turn.deltas:
            on_tokens(sum(len(tokens) for tokens in told.values()))
    return Result(tokens=told, layouts=layouts)


def difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None if there is none."""
    if list(got) == list(want):
        return None
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))


def main(job_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    result = run(job, lambda count: print(count, flush=True))
    Path(result_file).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
