"""Options that the serving benchmarks share: the model, its ranks, and how its server is started."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import msgspec

from perf import harness
from perf.floor import Floor
from splash_trt.config import EngineConfig
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.scheduler.devices import load_device

LAYOUTS = ("tp", "dp", "cp", "dop")
AUTO = "auto"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=harness.ROOT / "models" / "splash-tiny",
                        help="folder with a config.json; weights are random")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--run-on", default="auto", choices=["auto", "cpu", "gpu"])
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS, AUTO], choices=[*LAYOUTS, AUTO])
    parser.add_argument("--processes", type=int, default=4, help="of clients")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags of `splash-trt serve`, as one word")
    parser.add_argument("--floor", default=None, metavar="DEVICE",
                        help="whose floors stand beside the numbers: a built-in description or a file")  # fmt: skip
    parser.add_argument("--name", default=None, help="of the result")
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)


def flags(options: argparse.Namespace) -> list[str]:
    """For `splash-trt serve`. It starts in TP and may go anywhere."""
    out = ["--model", str(options.model.resolve()), "--load", "dummy", "--simulate-routing", "uniform"]
    out += ["--ranks", str(options.ranks), "--run-on", options.run_on, "--log-level", "warning"]
    if options.dtype:
        out += ["--dtype", options.dtype]
    return out + shlex.split(options.serve)


def floor_of(options: argparse.Namespace, model: ModelConfig) -> Floor | None:
    if options.floor is None:
        return None
    config = EngineConfig(num_ranks=options.ranks, dtype=options.dtype or "bfloat16")
    return Floor(model, config, load_device(options.floor))


def model_of(options: argparse.Namespace) -> ModelConfig:
    return load_config(options.model)


def provenance(options: argparse.Namespace, module: str, arguments: list[str]) -> harness.Provenance:
    """Folders by their names, and the model's config.json in full: where they lie on a machine is nobody's matter."""
    config = {name: value for name, value in vars(options).items() if name not in ("remark", "results")}
    folders = {name: value for name, value in config.items() if isinstance(value, Path)}
    config |= {name: value.name for name, value in folders.items()}
    config["model_config"] = msgspec.json.decode((options.model / "config.json").read_bytes())
    told = harness.without(arguments, "--remark", options.remark, "--results", str(options.results))
    short = {str(value): value.name for value in folders.values()}
    return harness.provenance(config, module, [short.get(word, word) for word in told], options.remark)
