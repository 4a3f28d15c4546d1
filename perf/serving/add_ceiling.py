"""Adds the ceiling to a rollout's result: `python -m perf.serving.add_ceiling RESULT --step-times FOLDER`.

For step times that were measured after the rollout. Overwrites the result and its report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf import harness, report
from perf.serving.ceiling import StepTimes
from perf.serving.rollout import CEILING, ceiling_rows, lengths, with_ratios


def with_ceiling(result: harness.Result, times: StepTimes) -> harness.Result:
    """The result with a ceiling, which replaces one that it has already."""
    config = result.provenance.config
    load = {name: config[name] for name in ("prompts", "median", "sigma", "most")}
    rows = [row for row in result.rows if row["layout"] != CEILING]
    rows += ceiling_rows(times, config["prompt"], lengths(**load), config["rounds"])
    return msgspec.structs.replace(result, rows=with_ratios(rows))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.serving.add_ceiling")
    parser.add_argument("result", type=Path)
    parser.add_argument("--step-times", type=Path, required=True,
                        help="folder with step_time.json and prefill.json of perf.engines.step_time")  # fmt: skip
    parser.add_argument("--step-times-prefix", default="", help="prefix of those two files' names")
    options = parser.parse_args(arguments)
    result = harness.read(options.result)
    times = StepTimes.read(options.step_times, result.provenance.config["ranks"], options.step_times_prefix)
    result = with_ceiling(result, times)
    report.publish(result, options.result.parents[1])
    print(report.markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
