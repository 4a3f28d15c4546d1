"""Following the load (auto) on real ranks, compared with every fixed layout: `python -m perf.auto --help`.

Serves two loads with the demo model on CPU ranks under mpirun: a burst that ends in a long tail, and a few clients
followed by a crowd with long prompts. Fixed layouts and auto take turns. Needs a machine that does nothing else. Writes
perf/results/policy/auto.{json,md,png}.
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
from perf.auto_ranks import AUTO, LABELS, Findings, Settings
from perf.cost_model import same_tokens
from splash_trt import environment
from splash_trt.launch import mpirun_command

VIEW = harness.View(x="round", y="seconds", series="layout", panels=("load",), ratio="auto_over")
TIME_LIMIT_S = 3600.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", type=float, default=0.4, help="scales the loads' output lengths")
    parser.add_argument("--minutes", type=float, default=1.5, help="time for calibrating, without --device")
    parser.add_argument("--device", type=Path, help="a file that splash-trt calibrate wrote, instead of calibrating")
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Findings:
    """Runs the ranks and waits for them. Raises CalledProcessError if they fail; the reason is on stderr."""
    device = msgspec.json.decode(options.device.read_bytes()) if options.device is not None else None
    values = {name: getattr(options, name) for name in Settings.__struct_fields__ if name != "device"}
    settings = msgspec.convert({**values, "device": device}, Settings)
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "settings.json", Path(folder) / "findings.json"
        given.write_bytes(msgspec.json.encode(settings))
        argv = mpirun_command(options.ranks, [sys.executable, "-m", "perf.auto_ranks", str(given), str(found)])
        env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1"}
        subprocess.run(argv, cwd=harness.ROOT, env=env, check=True, timeout=TIME_LIMIT_S)
        return msgspec.json.decode(found.read_bytes(), type=Findings)


def rows_of(found: Findings) -> list[harness.Row]:
    """A row for each load, round and label. auto_over: auto's time over this label's in the same round."""
    return [
        {
            "load": load,
            "round": turn + 1,
            "layout": label,
            "seconds": round(seconds, 3),
            "latency_mean_s": round(found.latency_s[load][label][turn], 3),
            "auto_over": round(by_label[AUTO][turn] / seconds, 4),
        }
        for load, by_label in found.seconds.items()
        for label in LABELS
        for turn, seconds in enumerate(by_label[label])
    ]


def summary(found: Findings) -> dict[str, float | str]:
    """For each load the labels' medians, and auto's time over the best fixed layout's: that of the medians, and the
    median of the rounds' ratios."""
    out: dict[str, float | str] = {}
    for load, by_label in found.seconds.items():
        medians = {label: float(np.median(seconds)) for label, seconds in by_label.items()}
        best = min((label for label in LABELS if label != AUTO), key=medians.__getitem__)
        out |= {f"{load}_{label}_s": round(value, 3) for label, value in medians.items()}
        out[f"{load}_best"] = best
        out[f"{load}_auto_over_best"] = round(medians[AUTO] / medians[best], 4)
        rounds = [[[value] for value in by_label[label]] for label in (AUTO, best)]
        out[f"{load}_auto_over_best_by_round"] = round(harness.ratio(*rounds), 4)
    return out


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    config = {name: getattr(options, name) for name in ("ranks", "dtype", "repeats", "size", "minutes")}
    settings = harness.without(arguments, "--remark", "--results")
    origin = harness.provenance(config, "perf.auto", settings, options.remark)
    found = measure(options)
    figures = summary(found)
    for name, value in figures.items():
        print(f"{name}: {value}")
    for load, rounds in found.changes.items():
        print(*(f"{load}, round {turn + 1}: {text or 'no switch'}" for turn, text in enumerate(rounds)), sep="\n")
    config |= {"model": "models/splash-tiny", "summary": figures, "device": found.device}
    config |= {"output_tokens": found.tokens, "auto_changes": found.changes}
    tokens = ", ".join(f"{count} of {load}" for load, count in found.tokens.items())
    what = f"every run made all output tokens ({tokens}); greedy tokens in float64, models/splash-tiny"
    result = harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="policy",
        name="auto",
        title="Following the load on CPU ranks, seconds to the last token (auto's time over it)",
        provenance=msgspec.structs.replace(origin, config=config),
        check=harness.checked(what, lambda: same_tokens(options.ranks)),
        view=VIEW,
        rows=rows_of(found),
    )
    path = report.publish(result, options.results)
    print(f"Wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
