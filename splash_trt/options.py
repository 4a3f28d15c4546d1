"""What the commands' options share: sizes in bytes, names of formats, and errors by the option that they are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from splash_trt import interruption
from splash_trt.config import DTYPES, EXPERTS_CUTS, FORMAT_ALIASES, FORMATS, RUN_ON_WISHES

FORMAT_NAMES = (*FORMAT_ALIASES, *FORMATS)
DTYPE_NAMES = (*FORMAT_ALIASES, *DTYPES)
MORE_ROOM = "take more ranks, more memory a rank, or smaller formats such as --weights fp8"
DEFAULT_SHARE = 0.9  # of a device's memory, for the arena
SHARE_HELP = (
    f"Of the device's memory, for the arena. Default: {DEFAULT_SHARE}, weights and cache as published figures count "
    "them; `serve` on GPUs takes 0.85, since CUDA graphs and activations are beside the arena."
)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

run_on_option = click.option(
    "--run-on", type=click.Choice(RUN_ON_WISHES), default=RUN_ON_WISHES[0], show_default=True,
    help="auto: GPUs where every rank has one; shared-gpu: GPUs, however few: to try it, slowly.",
)  # fmt: skip
experts_option = click.option(
    "--experts-cut", type=click.Choice(EXPERTS_CUTS), default=EXPERTS_CUTS[0], show_default=True,
    help="Routed experts over ranks: each whole on one, or a slice of each on all (same bytes read by all ranks).",
)  # fmt: skip


class Size(click.ParamType):
    """Bytes: 1048576, 512M, 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        number = str(value).upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in UNITS else ""
        try:
            return round(float(number.removesuffix(unit)) * UNITS[unit])
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size; write bytes, or a number with K, M, G or T, such as 4G", param, ctx)


class Number(click.FloatRange):
    """Numbers from (above: greater than) least to most. All options that take one have this type: NaN, which every
    comparison of click's own lets through, is none of them."""

    def __init__(self, least: float, most: float, *, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)
        self._least, self._most, self._above = least, most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(click.FLOAT.convert(value, param, ctx))
        if not self._least <= number <= self._most or (self._above and number == self._least):
            allowed = f"{'greater than' if self._above else 'from'} {self._least:.15g} to {self._most:.15g}"
            self.fail(f"{value!r} is not a number {allowed}", param, ctx)
        return number


def or_fail(act: Callable[[], Any]) -> Any:
    """act(), or its error as one that is said in one line, with an option by the name that the user gave it."""
    interruption.check()  # all that a command needs has been imported
    try:
        return act()
    except (ValueError, OSError) as error:
        field, colon, rest = str(error).partition(":")
        flags = {parameter.name: parameter.opts[0] for parameter in click.get_current_context().command.params}
        raise click.ClickException(flags.get(field, field) + colon + rest) from error
