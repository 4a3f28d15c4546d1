"""`splash-trt simulate`: runs the server's own scheduler and policy on simulated devices, under a recorded or generated
load."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from splash_trt.config import DEFAULTS, EngineConfig, Formats, Layout
from splash_trt.memory.map import model_sizes
from splash_trt.models.config import ModelConfig
from splash_trt.models.planning import load_for_planning
from splash_trt.models.runnable import refuse_cut
from splash_trt.options import (
    DEFAULT_SHARE,
    DTYPE_NAMES,
    FORMAT_NAMES,
    MORE_ROOM,
    SHARE_HELP,
    Number,
    Size,
    experts_option,
    or_fail,
)
from splash_trt.orchestrator import cost_policy
from splash_trt.scheduler.compare import Objective
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.device import Device
from splash_trt.scheduler.devices import load_device
from splash_trt.simulate import generators, plots, report
from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.compare import Comparison, compare, configs
from splash_trt.simulate.outcome import AUTO
from splash_trt.simulate.run import Progress
from splash_trt.simulate.traces import Trace, read_trace

LABELS = (AUTO, *(layout.name.lower() for layout in Layout))


class Labels(click.ParamType):
    """The type of --layouts: auto and names of layouts, separated by commas."""

    name = "layouts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip().lower() for name in str(value).split(",")))
        for name in names:
            if name not in LABELS:
                self.fail(f"{name!r} is not one of {', '.join(LABELS)}", param, ctx)
        return names


@click.command("simulate")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="A config.json, or its folder.")
@click.option("--device", required=True, help="A built-in device or a JSON file.")
@click.option("--ranks", "num_ranks", type=click.IntRange(1, 1024), required=True, help="Ranks, one per device.")
@click.option("--trace", required=True, metavar="FILE|NAME[:K=V,…]",
              help="Azure's CSV or Mooncake's .jsonl, or a load made from numbers: "
                   f"{', '.join(generators.names())}.")  # fmt: skip
@click.option("--layouts", type=Labels(), default=",".join(LABELS), show_default=True,
              help="What to compare. auto follows the load among the others that are named, or all.")  # fmt: skip
@click.option("--weights", type=click.Choice(FORMAT_NAMES), help="Format of the weights but attention's head-cut ones.")
@click.option("--attention", type=click.Choice(FORMAT_NAMES), help="Format of attention's head-cut weights.")
@click.option("--cache", type=click.Choice(FORMAT_NAMES), help="Format of the cache.")
@click.option("--dtype", type=click.Choice(DTYPE_NAMES), default="bfloat16", show_default=True,
              help="Arithmetic, and all numbers that no other option is about.")  # fmt: skip
@experts_option
@click.option("--memory", "memory_bytes", type=Size(), help="One rank's arena, as with `serve`.")
@click.option("--memory-share", type=Number(0, 1, above=True), help=SHARE_HELP)
@click.option("--max-batch-tokens", type=int, default=8192, show_default=True, help="Most tokens in one step.")
@click.option("--max-running", type=int, default=1024, show_default=True, help="Most requests that hold cache.")
@click.option("--max-context", type=int, help="Longest prompt + output; default: the model's.")
@click.option("--page-tokens", type=int, default=64, show_default=True, help="Tokens in a cache page.")
@click.option("--objective", default="throughput", show_default=True, metavar="throughput|latency|bounded:MS",
              help="What auto goes for; bounded: throughput with so many ms per output token (p99).")  # fmt: skip
@click.option("--policy-device", metavar="NAME|FILE",
              help="The device that auto decides by, if not --device: shows what wrong figures cost.")  # fmt: skip
@click.option("--migration-bytes", type=Size(), help="What a rank may at first send or receive for a switch in a step "
              "of 10 ms; default: 3.5 % of the device's link, as in `serve`.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=1), help="Only so many requests of a file.")
@click.option("--rate-scale", type=Number(0, 1e6, above=True), default=1.0, show_default=True,
              help="Let requests arrive so many times as fast.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of generated loads.")
@click.option("--plots", "plots_folder", type=click.Path(path_type=Path), metavar="DIR", help="Draw pictures there.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write everything there.")
def simulate_command(**fields: Any) -> None:
    """Compare each layout alone with following the load, on simulated devices.

    The scheduler, the policy, the switch and the accounting of the cache are those of `serve`; only the time that steps
    take is the cost model's.
    """
    options = Options(**fields)
    comparison = or_fail(lambda: run(options))
    click.echo(report.text(comparison))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options, by the names of its parameters."""

    model: Path
    device: str
    num_ranks: int
    trace: str
    layouts: tuple[str, ...] = LABELS
    weights: str | None = None
    attention: str | None = None
    cache: str | None = None
    dtype: str = "bfloat16"
    experts_cut: str = "whole"
    memory_bytes: int | None = None
    memory_share: float | None = None
    max_batch_tokens: int = 8192
    max_running: int = 1024
    max_context: int | None = None
    page_tokens: int = 64
    objective: str = "throughput"
    policy_device: str | None = None
    migration_bytes: int | None = None
    requests: int | None = None
    rate_scale: float = 1.0
    seed: int = 0
    plots_folder: Path | None = None
    json_file: Path | None = None


def run(options: Options) -> Comparison:
    """Simulate, and write the files that were asked for; ValueError and OSError say what a user got wrong."""
    objective = Objective.parse(options.objective)
    _check_outputs(options)
    model, quantised = load_for_planning(options.model)
    device = load_device(options.device)
    believed = device if options.policy_device is None else _policy_device(options.policy_device)
    memory, origin = _memory(options, device)
    base = _config(options, memory, device)
    refuse_cut(model, base)
    _check_room(model, base, options, origin)
    cost = CostModel(model, base, device)
    load = open_load(options)
    total = load.num_requests * (len(options.layouts) + (AUTO in options.layouts))
    with click.progressbar(length=total, label="Simulating", file=sys.stderr) as bar:
        comparison = compare(
            model,
            base,
            cost,
            load,
            options.layouts,
            lambda config: cost_policy(model, config, believed, objective),
            progress=_progress(bar, load.num_requests),
        )
        bar.update(total - bar.pos)
    comparison = _with_device(comparison, options, model, quantised, device, origin)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(comparison.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.plots_folder is not None:
        title = f"{options.model.name} on {base.num_ranks} x {device.name}"
        plots.draw(options.plots_folder, comparison, model, base, cost, title)
    return comparison


def _check_outputs(options: Options) -> None:
    """Raises ValueError if the files that were asked for cannot be written, before minutes are spent."""
    folder, file = options.plots_folder, options.json_file
    if folder is not None:
        if os.path.exists(folder) and not folder.is_dir():
            raise ValueError(f"plots_folder: {folder} is a file; name a folder")
        plots.pyplot()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"plots_folder: {folder} cannot be made: {error.strerror}; name another") from error
    if file is not None:
        if not os.path.isdir(file.parent):
            raise ValueError(f"json_file: there is no folder {file.parent}")
        if os.path.isdir(file):
            raise ValueError(f"json_file: {file} is a folder; name a file")
        try:
            if not os.path.exists(file):
                file.touch()
                file.unlink()
            elif not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ValueError(f"json_file: {file} cannot be written: {error.strerror}; name another") from error


def open_load(options: Options) -> Trace | Adversary:
    """The load that --trace names: a generated one if it begins with a generator's name and is no file, else a file."""
    name = options.trace.partition(":")[0]
    if name in generators.names() and not os.path.isfile(options.trace):
        if options.requests is not None:
            own = generators.counts(name)[0]
            raise ValueError(f"requests: is for files; {name} takes its own numbers, as in {name}:{own}=2")
        made = generators.make(options.trace, options.seed)
        if isinstance(made, Adversary):
            return made
        return made.at_rate(options.rate_scale)
    if not os.path.isfile(options.trace):  # Path.is_file raises for a name that no file can have
        raise ValueError(f"trace: {options.trace!r} is neither a file nor one of {', '.join(generators.names())}")
    trace = read_trace(Path(options.trace), requests=options.requests).at_rate(options.rate_scale)
    if options.rate_scale != 1:
        trace = dataclasses.replace(
            trace, notes=(f"arrivals {options.rate_scale:g} times as fast as recorded", *trace.notes)
        )
    return trace


def _progress(bar: Any, num_requests: int) -> Any:
    """Makes the progress callback of each run, by its label. One bar counts the ended requests of all runs."""
    begun: list[str] = []

    def of(label: str) -> Progress:
        before = len(begun) * num_requests
        begun.append(label)

        def show(seconds: float, ended: int) -> None:
            if sys.stderr.isatty():  # in a file, each new label would be a line
                bar.label = f"Simulating {label}, {seconds:.0f} s"
            bar.update(before + ended - bar.pos)

        bar.update(before - bar.pos)
        return show

    return of


def _memory(options: Options, device: Device) -> tuple[int, str]:
    """A rank's arena in bytes, and where that figure is from."""
    if options.memory_bytes is not None:
        if options.memory_share is not None:
            raise ValueError("memory_share: is a share of what --device has; --memory is the arena itself")
        return options.memory_bytes, "--memory"
    if not device.memory_bytes:
        raise ValueError(f"memory_bytes: {device.name} does not say how much memory it has; give --memory BYTES")
    share = DEFAULT_SHARE if options.memory_share is None else options.memory_share
    return int(device.memory_bytes * share), f"{100 * share:g} % of {device.memory_bytes:,} bytes"


def _check_room(model: ModelConfig, base: EngineConfig, options: Options, origin: str) -> None:
    """ValueError says which rank lacks how much, before anything runs."""
    try:
        for config in configs(base, options.layouts).values():
            model_sizes(model, config)
    except ValueError as error:
        if options.memory_bytes is not None:
            raise ValueError(f"{error}; {MORE_ROOM}") from error
        _, _, lacking = str(error).partition(": ")
        raise ValueError(f"device: {origin} are not enough: {lacking}; {MORE_ROOM}") from error


def _config(options: Options, memory: int, device: Device) -> EngineConfig:
    slowdown = DEFAULTS[device.run_on].get("migration_max_slowdown", EngineConfig.migration_max_slowdown)
    return EngineConfig(
        num_ranks=options.num_ranks,
        dtype=options.dtype,
        formats=Formats(weights=options.weights, attention=options.attention, cache=options.cache),
        memory_bytes=memory,
        page_tokens=options.page_tokens,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        max_context=options.max_context,
        experts_cut=options.experts_cut,
        migration_bytes=device.migration_bytes if options.migration_bytes is None else options.migration_bytes,
        migration_max_slowdown=slowdown,
    )


def _policy_device(name: str) -> Device:
    try:
        return load_device(name)
    except ValueError as error:
        raise ValueError(f"policy_{error}") from error


def _with_device(
    comparison: Comparison, options: Options, model: ModelConfig, quantised: bool, device: Device, origin: str
) -> Comparison:
    """The comparison, with assumptions about model and device added."""
    note = "; the checkpoint is quantised, which is not followed: the formats below are what is counted"
    head = (
        ("model", f"{options.model}: {model.model_type}, {model.num_layers} layers{note * quantised}"),
        ("device", f"{device.name}: {device.origin}"),
        ("memory", origin),
        ("steps", "as long as the cost model says; nothing else takes time"),
        ("objective", f"{options.objective} (for auto)"),
        *((("auto", f"takes the devices for {options.policy_device}"),) if options.policy_device else ()),
    )
    return dataclasses.replace(comparison, assumptions=head + comparison.assumptions)
