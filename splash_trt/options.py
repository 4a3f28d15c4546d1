"""What the commands' options share: sizes in bytes, and errors by the option that they are about."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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


class FiniteRange(click.FloatRange):
    """A FloatRange without NaN, which every comparison of click's lets through, and without infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return float(number)


def or_fail(act: Callable[[], Any]) -> Any:
    """act(), or its error as one that `cli.main` says in one line, with an option by the name that the user gave it."""
    try:
        return act()
    except (ValueError, OSError) as error:
        field, colon, rest = str(error).partition(":")
        flags = {parameter.name: parameter.opts[0] for parameter in click.get_current_context().command.params}
        raise click.ClickException(flags.get(field, field) + colon + rest) from error
