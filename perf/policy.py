"""What following the load (auto) gains, simulated: `python -m perf.policy {random,published} --help`.

random: seeded loads, and adversaries, loads that are made against auto; auto is compared with every fixed layout and
with the ceiling. Each run is appended to --state as it ends; runs of the same code that are there are not repeated.
published: the kinds of load that figures were published for, each layout's cache, and which layout is fastest when.
Writes perf/results/policy/.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from perf import harness, report
from perf.policy_loads import DEPLOYMENTS, FIXED, KINDS, LABELS
from perf.policy_plots import plot_cases
from perf.policy_published import published
from perf.policy_study import Case, cases, line, same_twice
from splash_trt.simulate.outcome import AUTO

VIEW = harness.View(x="number", y="over_best", series="layout", panels=("kind", "metric"))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m perf.policy", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    random = commands.add_parser("random", help="random loads and loads made against auto")
    random.add_argument("--traces", type=int, default=50)
    random.add_argument("--adversaries", type=int, default=10)
    random.add_argument("--first", type=int, default=1, help="the first seed")
    random.add_argument("--size", type=float, default=1.0, help="scales all counts of a load")
    random.add_argument("--worst", type=int, default=3, help="for how many of the worst cases to print what auto did")
    random.set_defaults(run=random_study)
    figures = commands.add_parser("published", help="figures to compare with published ones")
    figures.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    figures.add_argument("--deployments", nargs="*", type=int, default=list(range(len(DEPLOYMENTS))), help="by index")
    figures.set_defaults(run=published)
    for command in (random, figures):
        command.add_argument("--jobs", type=int, default=1, help="number of processes")
        command.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "splash_policy.jsonl")
        command.add_argument("--remark", default="simulated: the machine's speed has no part in the numbers")
        command.add_argument("--results", type=Path, default=harness.RESULTS)
    return parser.parse_args(arguments)


def rows_of(case: Case) -> list[harness.Row]:
    best = case.seconds(case.best)
    return [
        {
            "kind": case.kind,
            "metric": case.metric,
            "number": case.number,
            "where": str(case.where),
            "load": run.load,
            "layout": label,
            "makespan_s": round(run.makespan_s, 3),
            "latency_mean_s": round(run.latency_s, 3),
            "over_best": round(case.seconds(label) / best, 4),
            "steps": run.steps,
            "switches": max(len(run.switches) - 1, 0),
        }
        for label, run in ((label, case.runs[label]) for label in LABELS)
    ]


def summary(found: Sequence[Case]) -> dict[str, float]:
    """The figures that claims are made about."""
    out: dict[str, float] = {}
    for kind in ("random", "adversary"):
        some = [case for case in found if case.kind == kind]
        if not some:
            continue
        over = [case.over_best for case in some]
        shares = [case.ceiling_share for case in some]
        out |= {
            f"{kind}_loads": len(some),
            f"{kind}_auto_over_best_max": round(max(over), 4),
            f"{kind}_auto_over_best_median": round(float(np.median(over)), 4),
            f"{kind}_auto_over_best_min": round(min(over), 4),
            f"{kind}_ceiling_share_median": round(float(np.median(shares)), 4),
            f"{kind}_ceiling_share_min": round(min(shares), 4),
        }
        for name in FIXED:
            out[f"{kind}_best_{name}"] = sum(case.best == name for case in some)
    cpu_s = sum(run.cpu_s for case in found for run in case.runs.values())
    spans = [case.runs[AUTO].makespan_s for case in found]
    return out | {"simulated_s_median": round(float(np.median(spans)), 1), "cpu_s": round(cpu_s)}


def random_study(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    settings = harness.without(arguments, "--remark", "--state", "--results")
    config = {"traces": options.traces, "adversaries": options.adversaries, "first": options.first}
    config |= {"size": options.size, "models": "tests/oracles/published_configs.py"}
    origin = harness.provenance(config, "perf.policy", settings, options.remark)
    wanted = [("random", number) for number in range(options.first, options.first + options.traces)]
    wanted += [("adversary", number) for number in range(1, options.adversaries + 1)]
    found = cases(wanted, options.size, options.state, options.jobs, lambda case: print(line(case), flush=True))
    figures = summary(found)
    for name, value in figures.items():
        print(f"{name}: {value:g}")
    for case in sorted(found, key=lambda case: -case.over_best)[: options.worst]:
        print("", line(case), case.runs[AUTO].load, *case.runs[AUTO].switches, sep="\n  ")
    result = harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="policy",
        name="random",
        title="Following the load against fixed layouts: time over that of the best fixed layout",
        provenance=msgspec.structs.replace(origin, config={**config, "summary": figures}),
        check=harness.checked("the same load twice, under all layouts", same_twice),
        view=VIEW,
        rows=[row for case in found for row in rows_of(case)],
    )
    path = report.publish(result, options.results)
    plot_cases(result, path.with_name("random_sorted.png"))
    print(f"Wrote {path}")
    return 0


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes started for --jobs
    code: int = options.run(options, arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
