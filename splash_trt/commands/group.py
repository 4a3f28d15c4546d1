"""All commands of `splash-trt`. A command is loaded when it is used, so none waits for another's imports (torch)."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

import click

from splash_trt import __version__, environment
from splash_trt.commands.lazy import Entry, LazyGroup
from splash_trt.wording import shortened

EXIT_USAGE = 2
MAX_MESSAGE = 800
"""The most characters of an error that are printed: it may quote what a user gave."""
_MAX_END = 300
OTHERS_WAIT_S = 20.0  # in which rank 0 says what is wrong and ends, upon which mpirun ends the other ranks

# Each help is the first sentence of the command's own help.
COMMANDS = {
    "build": Entry(
        "splash_trt.commands.engines:build_command",
        "Make an engine: one folder for any number of ranks and every layout.",
    ),
    "calibrate": Entry(
        "splash_trt.commands.calibrate:calibrate_command",
        "Measure steps under every layout, and fit the description of this machine that the scheduler decides by.",
    ),
    "capacity": Entry(
        "splash_trt.capacity.command:capacity_command",
        "Say how much cache each layout has beside the weights.",
    ),
    "inspect": Entry(
        "splash_trt.commands.engines:inspect_command",
        "Say what an engine holds.",
    ),
    "serve": Entry(
        "splash_trt.commands.serve:serve_command",
        "Serve over HTTP, with ranks of our own (--ranks N) or as ranks of an mpirun.",
    ),
    "serve-rank": Entry(
        "splash_trt.commands.serve:rank_command",
        "One rank of a supervised run; started by `serve` through mpirun.",
        hidden=True,
    ),
    "simulate": Entry(
        "splash_trt.simulate.command:simulate_command",
        "Compare each layout alone with following the load, on simulated devices.",
    ),
    "top": Entry(
        "splash_trt.top.command:top_command",
        "Show a server's layout, load, cache and switches; Ctrl-C ends it.",
    ),
    "triton-repo": Entry(
        "splash_trt.triton_backend.command:triton_repo",
        "Write a model repository with which Triton Inference Server serves what `splash-trt serve` does.",
    ),
}


def run() -> NoReturn:
    """Run the command line. A user's mistake ends in a line on stderr and exit code 2, Ctrl-C in KeyboardInterrupt."""
    try:
        sys.exit(commands.main(prog_name="splash-trt", standalone_mode=False))
    except click.ClickException as error:
        _refuse(error.format_message())
    except click.Abort:  # which click makes of a KeyboardInterrupt
        raise KeyboardInterrupt from None


@click.group(cls=LazyGroup, table=COMMANDS)
@click.version_option(__version__, prog_name="splash-trt")
def commands() -> None:
    """Serve a latent-attention model under four attention layouts, and switch between them while requests run."""


def _refuse(message: str) -> NoReturn:
    rank = environment.mpi_rank()
    if rank != 0:
        time.sleep(OTHERS_WAIT_S)  # rank 0 prints the same, and once is enough
    place = f"rank {rank}: " if rank != 0 else ""
    text = shortened(" ".join(message.split()), most=MAX_MESSAGE, end=_MAX_END)
    sys.stderr.write(f"splash-trt: {place}{text}\n")
    sys.exit(EXIT_USAGE)
