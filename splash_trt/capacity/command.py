"""`splash-trt capacity`: how much cache a model's weights leave room for on a device, for each layout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from splash_trt.capacity.report import CUTS, Case, Lengths, case, num_parameters
from splash_trt.capacity.table import format_assumptions, format_case, format_count
from splash_trt.config import EngineConfig, Formats
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
from splash_trt.scheduler.device import Device
from splash_trt.scheduler.devices import load_device

BOTH = "both"
QUANTISED = (
    "; the checkpoint is quantised, which is not followed: --weights, --attention and --cache say what is counted"
)


@dataclass(frozen=True, kw_only=True)
class Report:
    assumptions: dict[str, str]
    """What all cases assume: {what it is about: text}."""
    device_origin: str | None
    """Where the device's figures are from; None if no device was named."""
    num_parameters: int
    memory_bytes: int
    """One rank's arena."""
    page_tokens: int
    cases: tuple[Case, ...]
    """One for each choice of formats."""


class LengthsOption(click.ParamType):
    """The type of --lengths: "P,O", tokens of the prompt and of the output."""

    name = "P,O"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            prompt, output = (int(number) for number in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not two whole numbers, such as 4096,1024", param, ctx)
        if prompt < 1 or output < 1:
            self.fail(f"{value!r}: prompt and output need one token at least", param, ctx)
        return Lengths(prompt=prompt, output=output)


@click.command("capacity")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="A config.json, or its folder.")
@click.option("--device", help="A built-in device or a JSON file; its memory, times --memory-share, is the arena.")
@click.option("--memory", "memory_bytes", type=Size(), help="One rank's arena, as with `serve`; without --device.")
@click.option("--ranks", "num_ranks", type=click.IntRange(1, 1024), required=True, help="Ranks, one per device.")
@click.option("--memory-share", type=Number(0, 1, above=True), help=SHARE_HELP)
@click.option("--dtype", type=click.Choice(DTYPE_NAMES), default="bfloat16", show_default=True,
              help="Arithmetic, and all numbers that no other option is about.")  # fmt: skip
@click.option("--attention", type=click.Choice([*FORMAT_NAMES, BOTH]),
              help="Format of attention's head-cut weights; both: one report for fp8 and one for bf16.")  # fmt: skip
@click.option("--weights", type=click.Choice(FORMAT_NAMES), help="Format of the other products' weights.")
@click.option("--cache", type=click.Choice(FORMAT_NAMES), help="Format of the cache.")
@experts_option
@click.option("--lengths", type=LengthsOption(), multiple=True,
              help="Prompt and output tokens, for the largest batch of such requests; may be repeated.")  # fmt: skip
@click.option("--page-tokens", type=int, default=64, show_default=True, help="Tokens in a cache page.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def capacity_command(as_json: bool, **options: Any) -> None:
    """Say how much cache each layout has beside the weights.

    The exit code is 2 if none has any.
    """
    report = or_fail(lambda: _report(**options))
    if as_json:
        click.echo(json.dumps(asdict(report), indent=1))
    else:
        click.echo(format_assumptions(report.assumptions))
        for found in report.cases:
            click.echo("\n" + format_case(found, report.page_tokens))
    if all(room.no_room for found in report.cases for room in found.layouts):
        given = "--memory" if options["device"] is None else "--device"
        raise click.ClickException(
            f"{given}: {report.memory_bytes:,} bytes a rank have no room for a page of cache in any layout; {MORE_ROOM}"
        )


def _report(
    model: Path,
    device: str | None,
    memory_bytes: int | None,
    memory_share: float | None,
    num_ranks: int,
    dtype: str,
    attention: str | None,
    weights: str | None,
    cache: str | None,
    experts_cut: str,
    lengths: tuple[Lengths, ...],
    page_tokens: int,
) -> Report:
    """The report that the options ask for. Raises ValueError if they do not fit together, or do not fit the model."""
    found, quantised = load_for_planning(model)
    known = None if device is None else load_device(device)
    memory, source = _memory(known, memory_bytes, memory_share)
    choices = ("fp8", "bfloat16") if attention == BOTH else (attention,)
    configs = [
        EngineConfig(
            num_ranks=num_ranks,
            dtype=dtype,
            formats=Formats(weights=weights, attention=choice, cache=cache),
            memory_bytes=memory,
            page_tokens=page_tokens,
            experts_cut=experts_cut,
        )
        for choice in choices
    ]
    refuse_cut(found, configs[0])
    parameters = num_parameters(found)
    context = configs[0].context_block
    return Report(
        assumptions={
            "model": f"{found.model_type}, {found.num_layers} layers, {format_count(parameters)} parameters; "
            "prediction layers are not counted" + QUANTISED * quantised,
            "ranks": str(num_ranks),
            "memory": f"{memory:,} bytes on each rank for workspace, weights and cache: {source}",
            "dtype": f"{configs[0].dtype}: all that no format is about; norms, biases, router, the indexer's head "
            "weights, embedding and head always are",
            **({} if found.experts is None else {"experts": CUTS[experts_cut]}),
            "fp8": "a float32 scale for 128 x 128 weights, or 128 numbers of a cache row, whose rope part is bfloat16",
            "workspace": f"the server's: {context} context rows and what they expand to; activations are not counted",
        },
        device_origin=None if known is None else known.origin,
        num_parameters=parameters,
        memory_bytes=memory,
        page_tokens=page_tokens,
        cases=tuple(case(found, config, lengths) for config in configs),
    )


def _memory(device: Device | None, memory_bytes: int | None, memory_share: float | None) -> tuple[int, str]:
    """A rank's arena in bytes, and where that figure is from."""
    if memory_bytes is not None:
        if device is not None or memory_share is not None:
            raise ValueError("memory_bytes: is the arena itself; give it without --device and --memory-share")
        return memory_bytes, "--memory"
    if device is None:
        raise ValueError("device: give either --device NAME_OR_JSON or --memory BYTES")
    if not device.memory_bytes:
        raise ValueError(f"device: {device.name} does not say how much memory it has; give --memory BYTES instead")
    share = DEFAULT_SHARE if memory_share is None else memory_share
    return int(device.memory_bytes * share), f"{100 * share:g} % of the {device.memory_bytes:,} of {device.name}"
