"""How well the cost model predicts steps that it was not calibrated on: `python -m perf.cost_model --help`.

Calibrates on ranks under mpirun by wall-clock time, as `splash-trt calibrate` does. With --threads, ranks are threads
of one process, of which one runs at a time, and the process's CPU time is measured: this excludes waiting, and is
hardly affected by whatever else the machine does. Writes perf/results/scheduler/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from perf import harness, report
from perf.engines.step_ranks import check
from splash_trt import environment
from splash_trt.calibrate.run import Calibration, calibrate
from splash_trt.calibrate.run import report as told
from splash_trt.config import EXPERTS_CUTS, RUN_ON_PLACES, Layout
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.launch import mpirun_command, run_under_mpi
from splash_trt.llm import LLM
from splash_trt.models.families import load_config
from splash_trt.request import SamplingParams
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.weights.dummy import DummyWeights

MODEL = harness.ROOT / "models" / "splash-tiny"
VIEW = harness.View(x="measured_ms", y="predicted_ms", series="layout", panels=("clock", "ranks"), ratio="error")
TIME_LIMIT_S = 1800.0
CHECK_PROMPTS = (3, 40, 130)  # tokens
CHECK_TOKENS = 8


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[harness.Row]
    device: dict[str, Any]
    text: str
    summary: dict[str, float]
    tokens: dict[str, list[list[int]]]
    """The tokens that the check compares, by layout; on GPUs only."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.cost_model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", action="store_true", help="ranks are threads, measured by CPU time")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to measure")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--run-on", default="cpu", choices=RUN_ON_PLACES)
    parser.add_argument("--model", type=Path, help="folder with a config.json, for random weights and uniform routing; "
                        "default: models/splash-tiny with its own weights")  # fmt: skip
    parser.add_argument("--experts-cut", default="whole", choices=EXPERTS_CUTS)
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(world: World, options: argparse.Namespace) -> Findings | None:
    """Called on every rank; rank 0 gets the findings, the others None."""
    torch.set_num_threads(1)
    model = load_config(options.model or MODEL)
    result = calibrate(
        world,
        model,
        Checkpoint(MODEL, model) if options.model is None else DummyWeights(model),
        simulate_routing="" if options.model is None else "uniform",
        experts_cut=options.experts_cut,
        dtype=options.dtype,
        seconds=60 * options.minutes,
        cores=1 if options.threads else None,
        clock=time.process_time if options.threads else time.perf_counter,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    tokens = check(world, list(Layout), "float64") if options.run_on != "cpu" else {}
    return None if result is None else findings(result, options, tokens)


def findings(result: Calibration, options: argparse.Namespace, tokens: dict[str, list[list[int]]]) -> Findings:
    rows: list[harness.Row] = [
        {
            "clock": "cpu" if options.threads else "wall",
            "ranks": options.ranks,
            "layout": p.cell.layout.name.lower(),
            "step": p.cell.name.partition(" ")[2],
            "measured_ms": round(p.seconds * 1e3, 3),
            "predicted_ms": round(p.seconds * (1 + p.error) * 1e3, 3),
            "error": round(p.error, 4),
        }
        for p in sorted(result.held, key=lambda p: (p.cell.layout, p.seconds))
    ]
    summary = {"fitted": float(result.fitted), "predicted": float(len(result.held))}
    for layout in (None, *Layout):
        name = layout.name.lower() if layout is not None else "all"
        summary[f"median_error_{name}"] = round(result.quantile(0.5, layout), 4)
        summary[f"p90_error_{name}"] = round(result.quantile(0.9, layout), 4)
    device = asdict(result.device)
    return Findings(rows=rows, device=device, text=told(result), summary=summary, tokens=tokens)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> Findings:
    """Starts the ranks and waits for them. Raises CalledProcessError if they fail; the reason is on stderr."""
    if options.threads:
        found = ThreadWorld(options.ranks, 300.0).run(lambda world: measure(world, options))[0]
        assert found is not None
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings.json"
        argv = [sys.executable, "-m", "perf.cost_model", *arguments, "--findings", str(path)]
        env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1"}
        command = mpirun_command(options.ranks, argv, on_gpus=options.run_on != "cpu")
        subprocess.run(command, cwd=harness.ROOT, env=env, check=True, timeout=TIME_LIMIT_S)
        return msgspec.json.decode(path.read_bytes(), type=Findings)


def rank(options: argparse.Namespace) -> int:
    """Runs one rank, which is this process."""

    def program(world: World) -> int:
        found = measure(world, options)
        if found is not None:
            options.findings.write_bytes(msgspec.json.encode(found))
        return 0

    run_under_mpi(program, 300.0, run_on=options.run_on)


def same_on_gpus(tokens: dict[str, list[list[int]]], ranks: int) -> str:
    """As same_tokens, for the tokens that the ranks computed on GPUs."""
    expected = tokens["tp"]
    for layout, found in tokens.items():
        assert found == expected, f"{layout} differs from tp"
    return f"the same {sum(map(len, expected))} tokens from {', '.join(tokens)} on {ranks} GPUs"


def same_tokens(ranks: int) -> str:
    """The check: the measured code computes the same tokens under all layouts. AssertionError names the first layout
    that does not."""
    expected: list[tuple[int, ...]] | None = None
    prompts = [[(7 * n + 13 * i) % 2048 for i in range(n)] for n in CHECK_PROMPTS]
    wish = SamplingParams(max_tokens=CHECK_TOKENS, temperature=0.0, ignore_eos=True)
    for layout in Layout:
        with LLM(MODEL, ranks=ranks, run_on="cpu", layout=layout.name.lower(), dtype="float64") as llm:
            tokens = [completion.tokens for completion in llm.generate(prompts, wish)]
        expected = expected or tokens
        assert tokens == expected, f"{layout.name.lower()} differs from tp"
    return f"the same {len(CHECK_PROMPTS) * CHECK_TOKENS} tokens from tp, dp, cp, dop on {ranks} ranks"


def check_of(options: argparse.Namespace, found: Findings) -> harness.Check:
    if options.run_on != "cpu":
        what = "greedy tokens in float64, tiny model"
        return harness.checked(what, lambda: same_on_gpus(found.tokens, options.ranks))
    return harness.checked("greedy tokens in float64, models/splash-tiny", lambda: same_tokens(options.ranks))


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.findings is not None and environment.under_mpirun():
        return rank(options)
    found = run(options, arguments)
    print(found.text)
    name = "splash-tiny" if options.model is None else options.model.name
    config = {
        name: getattr(options, name) for name in ("ranks", "threads", "minutes", "dtype", "run_on", "experts_cut")
    }
    config |= {"model": name, "summary": found.summary, "device": found.device}
    settings = harness.without(arguments, "--remark", "--results")
    settings = [name if word == str(options.model) else word for word in settings]
    where = {"gpu": "gpus", "shared-gpu": "shared_gpu", "cpu": "ranks"}[options.run_on]
    result = harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="scheduler",
        name=f"cost_model_{'threads' if options.threads else where}_{options.ranks}",
        title="Steps that the cost model was not calibrated on, predicted and measured",
        provenance=harness.provenance(config, "perf.cost_model", settings, options.remark),
        check=check_of(options, found),
        view=VIEW,
        rows=found.rows,
    )
    path = report.publish(result, options.results)
    print(f"Wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
