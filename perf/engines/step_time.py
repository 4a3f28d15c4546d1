"""Times of a decode step and of a prompt under each layout: `python -m perf.engines.step_time --help`.

Starts mpirun for each number of ranks (one CPU rank runs alone, without MPI), prints a table, and writes
perf/results/engines/{step_time,prefill}.json with their reports. Layouts run interleaved in the same processes, so
their ratios hold even on a machine that is used by others; the times themselves depend on what else it was doing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf import harness, report
from perf.engines.bench import model_folder
from perf.engines.step_ranks import CHECK_PROMPTS, CHECK_TOKENS, Findings, Settings
from perf.floor import Floor
from splash_trt import environment
from splash_trt.config import EXPERTS_CUTS, RUN_ON_PLACES, SIMULATED_ROUTING, EngineConfig, Layout
from splash_trt.launch import mpirun_command
from splash_trt.models.families import load_config
from splash_trt.scheduler.devices import load_device

DECODE = harness.View(
    x="batch", y="median_ms", series="layout", panels=("dtype", "ranks", "context"), ratio="ratio_to_tp"
)
PREFILL = harness.View(x="prompt", y="median_ms", series="layout", panels=("dtype", "ranks"), ratio="ratio_to_tp")
TIME_LIMIT_S = 1800.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.engines.step_time")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--run-on", default="cpu", choices=RUN_ON_PLACES)
    parser.add_argument("--model", default="small", help="name of a folder in perf/configs, or path of another folder")
    parser.add_argument("--simulate-routing", default="", choices=SIMULATED_ROUTING)
    parser.add_argument("--experts-cut", default="whole", choices=EXPERTS_CUTS)
    parser.add_argument("--check-dtype", default="float64", help="dtype of the check's tiny model")
    parser.add_argument("--layouts", nargs="+", default=["tp", "dp", "cp", "dop"], help="the first must be tp")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--max-cache-tokens", type=int, default=16384, help="cells with more tokens are left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup-steps", type=int, default=1)
    parser.add_argument("--round-s", type=float, default=0.25)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512])
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--floor", metavar="DEVICE",
                        help="add the least times on this device: a built-in description or a file")  # fmt: skip
    parser.add_argument("--prefix", default="", help="prefix of the results' names")
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, ranks: int) -> Settings:
    """The settings for a number of ranks. On one rank only the first layout is measured: all are the same there."""
    layouts = options.layouts if ranks > 1 else options.layouts[:1]
    values = {name: getattr(options, name) for name in Settings.__struct_fields__ if name not in ("ranks", "layouts")}
    return msgspec.convert({**values, "ranks": ranks, "layouts": layouts}, Settings)


def measure(settings: Settings) -> Findings:
    """Runs the ranks and waits for them. Raises CalledProcessError if they fail; the reason is on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "settings.json", Path(folder) / "findings.json"
        given.write_bytes(msgspec.json.encode(settings))
        argv = [sys.executable, "-m", "perf.engines.step_ranks", str(given), str(found)]
        if settings.ranks > 1 or settings.run_on != "cpu":
            argv = mpirun_command(settings.ranks, argv, on_gpus=settings.run_on != "cpu")
        env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1"}
        subprocess.run(argv, cwd=harness.ROOT, env=env, check=True, timeout=TIME_LIMIT_S)
        return msgspec.json.decode(found.read_bytes(), type=Findings)


def same_tokens(findings: Sequence[Findings]) -> str:
    """The check: all layouts with all numbers of ranks gave the same tokens. AssertionError names the first that did
    not."""
    all_tokens = [(f.decode[0]["ranks"], layout, t) for f in findings for layout, t in f.tokens.items()]
    ranks, layout, expected = all_tokens[0]
    for other_ranks, other, tokens in all_tokens[1:]:
        assert tokens == expected, f"{other} on {other_ranks} ranks differs from {layout} on {ranks}"
    names = ", ".join(f"{layout} on {n}" for n, layout, _ in all_tokens)
    return f"the same {sum(map(len, expected))} tokens from {names} ranks"


def result_of(
    name: str, view: harness.View, title: str, rows: list[harness.Row], check: harness.Check, p: harness.Provenance
) -> harness.Result:
    return harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="engines",
        name=name,
        title=title,
        provenance=p,
        check=check,
        view=view,
        rows=rows,
    )


def with_floors(rows: Sequence[harness.Row], options: argparse.Namespace) -> list[harness.Row]:
    """The rows with floor_ms, the least time of the step on --floor's device, and for decode steps experts_hit, the
    expected number of distinct experts used in a layer."""
    if options.floor is None:
        return list(rows)
    model, device = load_config(model_folder(options.model)), load_device(options.floor)
    out: list[harness.Row] = []
    for row in rows:
        floor = Floor(model, EngineConfig(num_ranks=int(row["ranks"] or 0), dtype=str(row["dtype"])), device)
        layout = Layout.parse(str(row["layout"]))
        if "batch" in row:
            batch = int(row["batch"] or 0)
            least = floor.decode_ms(layout, batch, int(row["context"] or 0))
            found: harness.Row = {"floor_ms": round(least, 4), "experts_hit": round(floor.experts_hit(batch), 1)}
        else:
            found = {"floor_ms": round(floor.prefill_ms(layout, int(row["prompt"] or 0)), 3)}
        out.append({**row, **found})
    return out


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    findings = [measure(settings_of(options, ranks)) for ranks in options.ranks]
    what = (
        f"greedy tokens in {options.check_dtype}, {len(CHECK_PROMPTS)} prompts, {CHECK_TOKENS} tokens each, tiny model"
    )
    check = harness.checked(what, lambda: same_tokens(findings))
    config = {name: value for name, value in vars(options).items() if name not in ("remark", "results")}
    folder = model_folder(options.model)
    config["model"] = folder.name
    config["model_config"] = msgspec.json.decode((folder / "config.json").read_bytes())
    settings = harness.without(arguments, "--remark", "--results")
    settings = [folder.name if word == options.model else word for word in settings]
    p = harness.provenance(config, "perf.engines.step_time", settings, options.remark)
    decode = with_floors([row for f in findings for row in f.decode], options)
    prefill = with_floors([row for f in findings for row in f.prefill], options)
    where = f"{options.run_on.upper()} ranks"
    titles = {"step_time": f"Decode step per layout, {where}", "prefill": f"One prompt to its first token, {where}"}
    for name, view, rows in (("step_time", DECODE, decode), ("prefill", PREFILL, prefill)):
        result = result_of(options.prefix + name, view, titles[name], rows, check, p)
        report.publish(result, options.results)
        print(report.markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
