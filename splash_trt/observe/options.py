"""The options of `splash-trt serve` for logs, traces and spans, named like the fields of serve.py's ServeOptions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from splash_trt.observe.log import FORMATS, LEVELS

Command = TypeVar("Command", bound=Callable[..., Any])


def observe_options(command: Command) -> Command:
    """Adds the options to a click command."""
    for option in (
        click.option("--otlp-endpoint", metavar="URL", help="Send a span a request to this OpenTelemetry collector."),
        click.option("--trace", metavar="FILE", help="Write rank 0's steps, moves and switches for ui.perfetto.dev."),
        click.option("--log-format", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True),
        click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True),
    ):
        command = option(command)
    return command


def check_trace(path: str) -> None:
    """Raises ValueError if the file cannot be written."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"trace: {path} cannot be written; give a file in a folder that exists and can be written to")
