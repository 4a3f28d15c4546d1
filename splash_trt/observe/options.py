"""The flags of `splash-trt serve` that say what an operator sees, named like serve.py's options."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from splash_trt.observe.log import FORMATS, LEVELS

Command = TypeVar("Command", bound=Callable[..., Any])


def observe_options(command: Command) -> Command:
    """Gives a click command the flags."""
    for option in (
        click.option("--otlp-endpoint", metavar="URL", help="Send a span a request to this OpenTelemetry collector."),
        click.option("--trace", metavar="FILE", help="Write rank 0's steps, moves and switches for ui.perfetto.dev."),
        click.option("--log-format", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True),
        click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True),
    ):
        command = option(command)
    return command


def check_trace(path: str) -> None:
    """ValueError if there can be no such file."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"trace: {path} cannot be written; give a file in a folder that exists and can be written to")
