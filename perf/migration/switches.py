"""The 12 switches between layouts under a steady load: `python -m perf.migration.switches --help`.

Starts mpirun for each number of ranks, prints tables, and writes perf/results/migration/{states,bytes,cost}.json with
their reports. Each number is the median over tours. "Slowdown" compares a switch's steps, as rank 0 sees them, with the
steps just before it, which have the old layout and the same requests; "on the device", it compares only the steps that
copy something. p99: the 99th percentile of a switch's steps over that of the steps before it, less 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from perf import harness, report
from perf.engines.bench import model_folder
from perf.migration.switch_ranks import FIRST_AROUND, KINDS, STATES, TOUR, WARMUP, Findings, Settings
from splash_trt import environment
from splash_trt.config import RUN_ON_PLACES, SIMULATED_ROUTING
from splash_trt.launch import mpirun_command

STATES_VIEW = harness.View(x="context", y="ms", series="pair", panels=("ranks", "budget_kib", "state"))
BYTES_VIEW = harness.View(x="context", y="kib", series="pair", panels=("ranks", "budget_kib", "kind"))
COST_VIEW = harness.View(x="context", y="value", series="pair", panels=("ranks", "budget_kib", "figure"))
TIME_LIMIT_S = 3600.0
SOME_STEPS = 24  # about how many steps a switch takes
TITLES = {
    "states": "Time in each state of a switch",
    "bytes": "What a switch moves between ranks and inside them",
    "cost": "What a switch costs the steps it runs in",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.migration.switches")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--run-on", default="cpu", choices=RUN_ON_PLACES)
    parser.add_argument("--model", default="small", help="name of a folder in perf/configs, or path of another folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--check-dtype", default="float64", help="dtype of the check's tiny model")
    parser.add_argument("--simulate-routing", default="", choices=SIMULATED_ROUTING)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--prefix", default="", help="prefix of the results' names")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode all the time")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1 << 20], help="migration_bytes at the start")
    parser.add_argument("--max-slowdown", type=float, default=1000.0, help="at which budgets shrink; default: never")
    parser.add_argument("--switch-deadline-s", type=float, default=600.0, help="a switch that takes longer fails")
    parser.add_argument("--rounds", type=int, default=4, help="tours of all switches; the first one is not counted")
    parser.add_argument("--quick", dest="check", action="store_false", help="print a summary; no check, no results")
    parser.add_argument("--around", type=int, default=8, help="steps before each switch; in the first tour 8 at most")
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, ranks: int) -> Settings:
    values = {name: getattr(options, name) for name in Settings.__struct_fields__ if name != "ranks"}
    return msgspec.convert({**values, "ranks": ranks}, Settings)


def expected_steps(settings: Settings) -> int:
    """About how many steps all tours with one number of ranks take. For example, at 12 ms a step 3 tours with --around
    60 take 31 s, besides the start, capturing graphs in the first tour, and the check."""
    arounds = [min(settings.around, FIRST_AROUND)] + [settings.around] * (settings.rounds - 1)
    tours = sum((len(TOUR) - 1) * (WARMUP + around + SOME_STEPS) for around in arounds)
    return tours * len(settings.budgets) * len(settings.contexts)


def measure(settings: Settings) -> Findings:
    """Runs the ranks and waits for them. Raises CalledProcessError if they fail; the reason is on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "settings.json", Path(folder) / "findings.json"
        given.write_bytes(msgspec.json.encode(settings))
        program = [sys.executable, "-m", "perf.migration.switch_ranks", str(given), str(found)]
        env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1"}
        argv = mpirun_command(settings.ranks, program, on_gpus=settings.run_on != "cpu")
        subprocess.run(argv, cwd=harness.ROOT, env=env, check=True, timeout=TIME_LIMIT_S)
        return msgspec.json.decode(found.read_bytes(), type=Findings)


def same_tokens(findings: Sequence[Findings]) -> str:
    """The check: a tour of switches changed no token. AssertionError names the first request for which it did."""
    for found in findings:
        for request_id, tokens in found.plain.items():
            assert found.switched[request_id] == tokens, f"request {request_id} was told something else"
    count = sum(len(tokens) for found in findings for tokens in found.plain.values())
    return f"{count} tokens with a tour of all 12 switches under them, the same as without"


def cells(rows: Sequence[harness.Row], panel: str, columns: dict[str, str], value: str) -> list[harness.Row]:
    """Medians over rounds: a row for each cell and each of `columns` (the name to put into column `panel`: the column
    of `rows` to take)."""
    keys = ("ranks", "budget_kib", "pair", "context")
    out: list[harness.Row] = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in keys) == key]
        for name, column in columns.items():
            known = [float(row[column] or 0) for row in mine if row[column] is not None]
            middle = round(float(np.median(known)), 4) if known else 0.0
            out.append({**dict(zip(keys, key, strict=True)), panel: name, value: middle, "rounds": len(known)})
    return out


def tables(rows: Sequence[harness.Row]) -> dict[str, tuple[harness.View, list[harness.Row]]]:
    """The view and the rows of each result, by its name."""
    states = cells(rows, "state", {state: f"{state}_ms" for state in STATES}, "ms")
    steps = cells(rows, "state", {state: f"{state}_steps" for state in STATES}, "steps")
    for row, other in zip(states, steps, strict=True):
        row["steps"] = other["steps"]
    moved = cells(rows, "kind", {kind: f"{kind}_bytes" for kind in (*KINDS, "inside")}, "kib")
    for row in moved:
        row["kib"] = round(float(row["kib"] or 0) / 1024, 1)
    figures = {
        "step ms": "step_ms",
        "step on the device, ms": "device_step_ms",
        "slowdown on the device": "device_slowdown",
        "slowdown on the device, p99": "device_slowdown_p99",
        "a step without copies over the median, p99": "device_variation_p99",
        "slowdown, median": "slowdown_median",
        "slowdown, p99": "slowdown_p99",
        "stall of the commit, ms": "stall_ms",
        "GB/s a rank": "rate_gb_s",
        "budget after it, MiB": "budget_mib",
    }
    cost = cells(rows, "figure", figures, "value")
    return {"states": (STATES_VIEW, states), "bytes": (BYTES_VIEW, moved), "cost": (COST_VIEW, cost)}


def summary(ranks: int, found: Findings) -> str:
    """Text on all switches with one number of ranks: figures with their median, 1st and 99th percentile, and medians
    for each pair."""
    lines = [f"{ranks} ranks, {len(found.rows)} switches, {len(found.slowdowns)} steps with copies"]
    figures = {
        "slowdown of a step with copies, %": [1e2 * x for x in found.slowdowns],
        "variation of a step without, %": [1e2 * x for x in found.variations],
        "stall of a commit, ms": _known(found.rows, "stall_ms"),
        "migration, GB/s a rank": _known(found.rows, "rate_gb_s"),
        "a switch, ms": [sum(float(row[f"{state}_ms"] or 0) for state in STATES) for row in found.rows],
    }
    for name, values in figures.items():
        low, middle, high = np.percentile(values, (1, 50, 99)) if values else (np.nan,) * 3
        lines.append(f"  {name:36} median {middle:8.3f}   p1 {low:8.3f}   p99 {high:8.3f}")
    for pair in dict.fromkeys(str(row["pair"]) for row in found.rows):
        mine = [row for row in found.rows if row["pair"] == pair]
        cells = {
            "step ms": _known(mine, "device_step_ms"),
            "slower %": [1e2 * x for x in _known(mine, "device_slowdown")],
            "p99 %": [1e2 * x for x in _known(mine, "device_slowdown_p99")],
            "stall ms": _known(mine, "stall_ms"),
            "GB/s": _known(mine, "rate_gb_s"),
            **{f"{kind} MB": [x / 1e6 for x in _known(mine, f"{kind}_bytes")] for kind in KINDS},
            **{f"{state} steps": _known(mine, f"{state}_steps") for state in STATES},
        }
        told = "  ".join(f"{name} {np.median(values):.2f}" for name, values in cells.items() if values)
        lines.append(f"  {pair:8} {told}")
    return "\n".join(lines)


def _known(rows: Sequence[harness.Row], name: str) -> list[float]:
    return [float(row[name] or 0) for row in rows if row[name] is not None]


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    findings = []
    for ranks in options.ranks:
        settled = settings_of(options, ranks)
        print(f"{ranks} ranks: some {expected_steps(settled)} steps", file=sys.stderr, flush=True)
        findings.append(measure(settled))
    for ranks, found in zip(options.ranks, findings, strict=True):
        print(summary(ranks, found))
    if not options.check:
        return 0
    what = f"tokens in {options.check_dtype}, greedy and sampled, tiny model, on as many ranks"
    check = harness.checked(what, lambda: same_tokens(findings))
    config = {name: value for name, value in vars(options).items() if name not in ("remark", "results", "check")}
    folder = model_folder(options.model)
    config["model"] = folder.name
    config["model_config"] = msgspec.json.decode((folder / "config.json").read_bytes())
    settings = harness.without(arguments, "--remark", "--results")
    settings = [folder.name if word == options.model else word for word in settings]
    p = harness.provenance(config, "perf.migration.switches", settings, options.remark)
    for name, (view, rows) in tables([row for found in findings for row in found.rows]).items():
        result = harness.Result(
            schema=harness.SCHEMA_VERSION,
            area="migration",
            name=options.prefix + name,
            title=f"{TITLES[name]}, {options.run_on.upper()} ranks",
            provenance=p,
            check=check,
            view=view,
            rows=rows,
        )
        report.publish(result, options.results)
        print(report.markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
