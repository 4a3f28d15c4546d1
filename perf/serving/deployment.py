"""Options that the serving benchmarks share: the model, its ranks, and how its server is started."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Collection
from pathlib import Path

import msgspec

from perf import harness
from perf.floor import Floor
from perf.serving.server import Server, Started
from splash_trt.config import RUN_ON_WISHES, EngineConfig
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.scheduler.devices import load_device

LAYOUTS = ("tp", "dp", "cp", "dop")
AUTO = "auto"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how a server is started."""
    parser.add_argument("--model", type=Path, default=harness.ROOT / "models" / "splash-tiny",
                        help="folder with a config.json; weights are random")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--run-on", default="auto", choices=RUN_ON_WISHES)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags of `splash-trt serve`, one argument")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument("--at", type=Path, default=None, metavar="FILE",
                        help="use perf.serving.hold's server, of the same flags; default: our own")  # fmt: skip
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS, AUTO], choices=[*LAYOUTS, AUTO])
    parser.add_argument("--processes", type=int, default=4, help="number of client processes")
    parser.add_argument("--floor", default=None, metavar="DEVICE",
                        help="add the least times on this device: a built-in description or a file")  # fmt: skip
    parser.add_argument("--name", default=None, help="the result's name")
    parser.add_argument("--remark", default="nothing is known of what else the machine was doing")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)


def flags(options: argparse.Namespace) -> list[str]:
    """The flags of `splash-trt serve`. The server starts in TP and may switch to every layout."""
    out = ["--model", str(options.model.resolve()), "--load", "dummy", "--simulate-routing", "uniform"]
    out += ["--ranks", str(options.ranks), "--run-on", options.run_on, "--log-level", "warning"]
    if options.dtype:
        out += ["--dtype", options.dtype]
    return out + shlex.split(options.serve)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What perf.serving.hold writes about its server."""

    port: int
    flags: list[str]


def server(options: argparse.Namespace) -> contextlib.AbstractContextManager[Server]:
    """A server that is started here, or that of --at. ValueError if that is gone, or has other flags than the result
    would name."""
    wanted = flags(options)
    if options.at is None:
        return Started(wanted)
    try:
        held = msgspec.json.decode(options.at.read_bytes(), type=Held)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"at: {options.at} is not of a server that perf.serving.hold holds: {error}") from error
    if held.flags != wanted:
        raise ValueError(f"at: the server was started with {shlex.join(held.flags)}, not {shlex.join(wanted)}")
    found = Server(held.port)
    try:
        found.ask("GET", "/readyz")
    except OSError as error:
        raise ValueError(f"at: no server answers at port {held.port}; remove {options.at}, and hold another") from error
    return contextlib.nullcontext(found)


def floor_of(options: argparse.Namespace, model: ModelConfig) -> Floor | None:
    if options.floor is None:
        return None
    config = EngineConfig(num_ranks=options.ranks, dtype=options.dtype or "bfloat16")
    return Floor(model, config, load_device(options.floor))


def model_of(options: argparse.Namespace) -> ModelConfig:
    return load_config(options.model)


def provenance(
    options: argparse.Namespace, module: str, arguments: list[str], done: Collection[str]
) -> harness.Provenance:
    """The provenance of a result. Folders are given by their names, not their places on this machine, and the model's
    config.json is given in full.

    done: the layouts that were measured; the remark says which were not.
    """
    missing = [layout for layout in options.layouts if layout not in done]
    remark = options.remark + (f"; not measured: {', '.join(missing)}" if missing else "")
    config = {name: value for name, value in vars(options).items() if name not in ("at", "remark", "results")}
    folders = {name: value for name, value in config.items() if isinstance(value, Path)}
    config |= {name: value.name for name, value in folders.items()}
    config["model_config"] = msgspec.json.decode((options.model / "config.json").read_bytes())
    told = harness.without(arguments, "--remark", "--results", "--at")
    short = {str(value): value.name for value in folders.values()}
    return harness.provenance(config, module, [short.get(word, word) for word in told], remark)
