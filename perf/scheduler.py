"""Times of planning a step and of taking in its result, without a model: `python -m perf.scheduler --help`.

The real scheduler runs with made-up results. `running` requests decode, and `queued` more wait because every slot is
taken. In "spread" cases prompts have random lengths, so that in each step about one request in 64 (the tokens of a
page) needs a new page; in "aligned" cases all have the same length, so that all need one in the same step. Times are
CPU seconds of single calls, so that other work on the machine is not measured too.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perf import harness, report
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import Residency
from splash_trt.migration.diff import Sizes
from splash_trt.plan import Plan, StepResult, encode
from splash_trt.request import Request, SamplingParams
from splash_trt.scheduler.scheduler import Scheduler

VIEW = harness.View(x="running", y="median_ms", series="call", panels=("layout", "queued", "pages"), ratio=None)
PAGE_TOKENS = 64
VOCAB = 1000
PROMPT = (20, 84)  # range of prompts' lengths in tokens; "aligned" takes the middle
MAX_CONTEXT = 1 << 14


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.scheduler")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layouts", nargs="+", default=["tp", "dp", "cp", "dop"])
    parser.add_argument("--running", type=int, nargs="+", default=[50, 256, 1024, 4096])
    parser.add_argument("--queued", type=int, nargs="+", default=[0, 10000])
    parser.add_argument("--pages", nargs="+", default=["spread", "aligned"], choices=["spread", "aligned"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    return parser.parse_args(arguments)


def new_scheduler(layout: Layout, ranks: int, running: int) -> Scheduler:
    """A scheduler with cache for all running requests."""
    config = EngineConfig(
        num_ranks=ranks, layout=layout, page_tokens=PAGE_TOKENS, max_batch_tokens=1 << 20, max_running=running
    )
    pages = (running * 12 + 4096,) * ranks
    sizes = Sizes(
        page_tokens=PAGE_TOKENS,
        row_bytes=1 << 16,
        itemsize=2,
        heads=(1,) * ranks,
        head_numbers=(1,),
        pages={Residency.SHARD: pages, Residency.FULL: pages},
    )
    return Scheduler(
        config,
        sizes=sizes,
        request_tokens=MAX_CONTEXT,
        vocab_size=VOCAB,
        max_context=MAX_CONTEXT,
        eos_token_ids=(0,),
    )


def fill(scheduler: Scheduler, count: int, aligned: bool) -> None:
    lengths = np.random.default_rng(0).integers(*PROMPT, count)
    if aligned:
        lengths[:] = sum(PROMPT) // 2
    sampling = SamplingParams(max_tokens=MAX_CONTEXT - PROMPT[1])
    for i, length in enumerate(lengths.tolist()):
        scheduler.add(Request(id=f"r{i}", prompt=(1,) * length, sampling=sampling))


def made_up(plan: Plan) -> StepResult:
    """A result that ends no request."""
    wanted = len(plan.want_index)
    return StepResult(
        step=plan.step,
        token=np.full(wanted, 5, np.int64),
        logprob=np.full(wanted, -1.0),
        top_token=np.zeros((wanted, 0), np.int64),
        top_logprob=np.zeros((wanted, 0)),
    )


def drive(scheduler: Scheduler, steps: int) -> tuple[list[float], list[float], list[Plan]]:
    """Seconds of schedule() and of complete() for each step after the one that admits all, and their plans."""
    scheduling, completing, plans = [], [], []
    for step in range(steps + 1):
        begin = time.process_time()
        plan = scheduler.schedule(1.0 + step / 100)
        middle = time.process_time()
        assert plan is not None
        result = made_up(plan)
        restart = time.process_time()
        scheduler.complete(result)
        end = time.process_time()
        if step:
            scheduling.append(middle - begin)
            completing.append(end - restart)
            plans.append(plan)
    return scheduling, completing, plans


def measure(options: argparse.Namespace) -> list[harness.Row]:
    rows: list[harness.Row] = []
    for name in options.layouts:
        for running in options.running:
            for queued in options.queued:
                for pages in options.pages:
                    scheduler = new_scheduler(Layout.parse(name), options.ranks, running)
                    fill(scheduler, running + queued, pages == "aligned")
                    gc.collect()
                    scheduling, completing, _ = drive(scheduler, options.steps)
                    for call, seconds in (("schedule", scheduling), ("complete", completing)):
                        row: harness.Row = {"layout": name, "running": running, "queued": queued, "pages": pages}
                        row |= {"call": call, "max_ms": max(seconds) * 1e3}
                        rows.append({**row, **harness.summary([seconds])})
    return rows


def same_plans(options: argparse.Namespace) -> str:
    """The check: two runs over the same requests make plans of the same bytes, and every page has one user.
    AssertionError if not."""
    count = 0
    for name in options.layouts:
        found = []
        for _ in range(2):
            scheduler = new_scheduler(Layout.parse(name), options.ranks, 64)
            fill(scheduler, 100, aligned=False)
            found.append([encode(plan) for plan in drive(scheduler, 80)[2]])
            scheduler.directory.check()
        assert found[0] == found[1], f"{name}: two runs over the same requests made different plans"
        count += len(found[0])
    return f"{count} plans of 64 running requests were the same bytes in both runs, and every page had one user"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    rows = measure(options)
    check = harness.checked("the same requests make the same plans", lambda: same_plans(options))
    config = {name: value for name, value in vars(options).items() if name not in ("remark", "results")}
    config |= {"page_tokens": PAGE_TOKENS, "prompt_tokens": PROMPT}
    settings = harness.without(arguments, "--remark", "--results")
    result = harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="scheduler",
        name="step",
        title="Planning a step, and taking in its result",
        provenance=harness.provenance(config, "perf.scheduler", settings, options.remark),
        check=check,
        view=VIEW,
        rows=rows,
    )
    report.publish(result, options.results)
    print(report.markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
