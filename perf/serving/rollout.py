"""Makespan of a reinforcement-learning rollout on one server: `python -m perf.serving.rollout --help`.

All prompts are sent at once, and the rollout ends when all answers have. Lengths are log-normal; clients ask for the
longest length and leave when they have theirs, so the server does not know lengths. Layouts are pinned in turn, then
auto follows the load; in a round all get the same prompts. Auto's policy keeps what it has learnt about steps' times:
if it comes after the others, it knows all layouts, like a server that has seen such rollouts; if before them, little
more than what --device says. What it thinks of its last changes is forgotten when a layout is pinned. With --step-times
the ceiling is added; add_ceiling.py adds it later. Writes perf/results/serving/<name>.{json,md,png}.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perf import harness, report
from perf.serving import deployment, load
from perf.serving.ceiling import StepTimes, rollout_s
from perf.serving.client import Wish
from perf.serving.server import MODEL_NAME, Server

VIEW = harness.View(x="round", y="seconds", series="layout", panels=("load",), ratio="auto_over")
CEILING = "ceiling"
SEED = 7
WARM_SEED = 1000


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.serving.rollout")
    deployment.add_options(parser)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--median", type=int, default=600, help="median of the answers' lengths in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of their logarithms")
    parser.add_argument("--most", type=int, default=4096, help="tokens of the longest answer at most")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=32,
                        help="each layout first serves it with answers so many times as short; 0: none")  # fmt: skip
    parser.add_argument("--step-times", type=Path, default=None,
                        help="folder with step_time.json and prefill.json of perf.engines.step_time")  # fmt: skip
    parser.add_argument("--step-times-prefix", default="", help="prefix of those two files' names")
    return parser.parse_args(arguments)


def lengths(*, prompts: int, median: int, sigma: float, most: int) -> list[int]:
    """The answers' lengths in tokens, the same in every run."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(median), sigma, prompts)
    return np.clip(np.rint(drawn), 1, most).astype(int).tolist()


def ceiling_rows(times: StepTimes, prompt: int, outputs: Sequence[int], rounds: int) -> list[harness.Row]:
    """How long the rollout would take if every step had the fastest layout, as a row for each round."""
    seconds = round(rollout_s(times, prompt, outputs, times.layouts), 3)
    return [{"load": "rollout", "round": r + 1, "layout": CEILING, "seconds": seconds} for r in range(rounds)]


def warm_up(server: Server, options: argparse.Namespace, outputs: Sequence[int], vocab_size: int) -> None:
    """Has every layout that will be used run such steps: all prompts together, then batches from all requests down to
    one. Clients leave here too, since a server that saw short answers end would expect more of them."""
    fixed = deployment.LAYOUTS if deployment.AUTO in options.layouts else options.layouts
    short = [-(-length // options.warmup) for length in outputs]
    wishes = [Wish(options.prompt, length, max(options.most, length + 1)) for length in short]
    for label in dict.fromkeys(fixed):
        server.go_to(label)
        load.run(
            server.url, MODEL_NAME, vocab_size, wishes, clients=len(wishes), processes=options.processes, seed=WARM_SEED
        )
        server.wait_until_idle()


def run_once(
    server: Server, options: argparse.Namespace, wishes: Sequence[Wish], vocab_size: int, label: str, seed: int
) -> harness.Row:
    """One rollout under one label, from an idle server to an idle server."""
    if label == deployment.AUTO:
        server.go_to("tp")  # the layout in which a server starts
    server.go_to(label)
    before = len(server.get("/v1/switches")["data"])
    answers = load.run(
        server.url, MODEL_NAME, vocab_size, wishes, clients=len(wishes), processes=options.processes, seed=seed
    )
    server.wait_until_idle()
    switches = server.get("/v1/switches")["data"]
    new = [f"{s['source']}-{s['target']}" for s in reversed(switches[: len(switches) - before])]
    row: harness.Row = {"layout": label, **load.figures(answers), "switches": " ".join(new)}
    print(row, file=sys.stderr, flush=True)
    return row


def with_ratios(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """The rows with auto_over: auto's time over this label's in the same round."""
    auto = {row["round"]: float(row["seconds"] or 0) for row in rows if row["layout"] == deployment.AUTO}
    out: list[harness.Row] = []
    for row in rows:
        known = row["round"] in auto and row["seconds"]
        out.append({**row, "auto_over": round(auto[row["round"]] / float(row["seconds"] or 1), 4) if known else None})
    return out


def all_told(rows: Sequence[harness.Row], tokens: int) -> str:
    """The check: no answer was cut short or lost. AssertionError if one was."""
    failed = sum(int(row["failed"] or 0) for row in rows)
    assert failed == 0, f"{failed} answers were lost"
    return f"all answers of {len(rows)} runs were whole, {tokens} tokens in each run"


def result_of(
    options: argparse.Namespace, arguments: Sequence[str], measured: Sequence[harness.Row], outputs: Sequence[int]
) -> harness.Result:
    """The result of the runs so far."""
    rows = list(measured)
    if options.step_times is not None:
        times = StepTimes.read(options.step_times, options.ranks, options.step_times_prefix)
        rows += ceiling_rows(times, options.prompt, outputs, options.rounds)
    done = {str(row["layout"]) for row in measured}
    return harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="serving",
        name=options.name or "rollout",
        title="A rollout's makespan in seconds (auto's over it)",
        provenance=deployment.provenance(options, "perf.serving.rollout", list(arguments), done),
        check=harness.checked("answers have their lengths", lambda: all_told(measured, sum(outputs))),
        view=VIEW,
        rows=with_ratios(rows),
    )


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    model = deployment.model_of(options)
    outputs = lengths(prompts=options.prompts, median=options.median, sigma=options.sigma, most=options.most)
    wishes = [Wish(options.prompt, length, max(options.most, length + 1)) for length in outputs]
    measured: list[harness.Row] = []
    with deployment.server(options) as server:
        if options.warmup:
            warm_up(server, options, outputs, model.vocab_size)
        once = functools.partial(run_once, server, options, wishes, model.vocab_size)
        for turn in range(options.rounds):
            for label in options.layouts:
                measured.append({"load": "rollout", "round": turn + 1, **once(label, turn)})
                result = result_of(options, arguments, measured, outputs)
                if result.check.passed:  # kept, whatever happens later
                    report.publish(result, options.results)
    print(report.markdown(result))
    report.publish(result, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
