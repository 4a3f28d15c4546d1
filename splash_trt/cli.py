"""The command `splash-trt`: build, inspect, serve."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from splash_engines.build import build_engine
from splash_engines.open import format_inspection, inspect_engine
from splash_trt import __version__, environment
from splash_trt.calibrate.command import calibrate_command
from splash_trt.capacity.command import capacity_command
from splash_trt.config import DTYPES
from splash_trt.frontend.options import http_options, take_settings
from splash_trt.observe.options import observe_options
from splash_trt.options import Size, or_fail
from splash_trt.serve import ServeOptions, check_frontend, engine_config, open_model, serve_rank
from splash_trt.simulate.command import simulate_command
from splash_trt.supervise import RankSettings, supervise
from splash_trt.top.command import top_command
from splash_trt.triton_backend.command import triton_repo

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
OTHERS_WAIT_S = 20.0  # for rank 0 to say what is wrong, upon whose end mpirun ends the others


def main() -> NoReturn:
    """The command line. What a user got wrong is one line on stderr and exit code 2."""
    try:
        sys.exit(commands.main(prog_name="splash-trt", standalone_mode=False))
    except click.ClickException as error:
        _refuse(error.format_message())
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)


@click.group()
@click.version_option(__version__, prog_name="splash-trt")
def commands() -> None:
    """Serve a latent-attention model under four attention layouts, and switch between them while requests run."""


@commands.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Hugging Face folder to build from.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option("--self-contained", is_flag=True, help="Copy the experts too instead of referring to the checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace an engine that is already there.")
def build(model: Path, out: Path, self_contained: bool, overwrite: bool) -> None:
    """Make an engine: one folder for any number of ranks and every layout."""
    with click.progressbar(length=1, label=f"Building {out.name}", file=sys.stderr) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.length = max(1, total)
            bar.update(done - bar.pos)

        kinds = {"self_contained": self_contained, "overwrite": overwrite}
        or_fail(lambda: build_engine(model, out, progress=progress, **kinds))
    click.echo(f"Built {out}")


@commands.command()
@click.argument("engine", type=click.Path(path_type=Path))
def inspect(engine: Path) -> None:
    """Say what an engine holds."""
    click.echo(format_inspection(or_fail(lambda: inspect_engine(engine))))

OBJECTIVE_HELP = "What auto goes for: throughput, latency, or bounded:MS (throughput, p99 per token at most MS)."
DEVICE_HELP = "What auto takes the ranks' devices for; default: the engine's calibration, else this machine."


@commands.command()
@click.option("--engine", help="Engine folder, made by `splash-trt build`.")
@click.option("--model", help="Folder with a config.json, for --dummy-weights.")
@click.option("--dummy-weights", type=int, metavar="SEED", help="Random weights of the model's sizes; no tokenizer.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to start; under mpirun its -n says it.")
@click.option(
    "--layout", type=click.Choice(["auto", "tp", "dp", "cp", "dop"]), default="auto", show_default=True,
    help="auto follows the load; another is where it starts and stays until an operator switches.",
)  # fmt: skip
@click.option("--objective", default="throughput", show_default=True, metavar="GOAL", help=OBJECTIVE_HELP)
@click.option("--device", metavar="NAME|FILE", help=DEVICE_HELP)
@click.option("--dtype", type=click.Choice(DTYPES), help="Default: the checkpoint's.")
@click.option("--memory", "memory_bytes", type=Size(), help="One rank's arena: weights, workspaces and cache.")
@click.option("--page-tokens", type=int, default=64, show_default=True, help="Tokens in a cache page.")
@click.option("--max-batch-tokens", type=int, default=2048, show_default=True, help="Most tokens in one step.")
@click.option("--max-running", type=int, default=256, show_default=True, help="Most requests that hold cache.")
@click.option("--max-context", type=int, help="Longest prompt + output; default: the model's.")
@click.option("--step-deadline", "step_deadline_s", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="A rank that is longer in one step ends the run.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="0: any free one; the log says which.")  # fmt: skip
@click.option("--name", help="The model's name in the API; default: the folder's.")
@http_options
@click.option("--client-endpoint", metavar="ADDRESS",
              help="Serve Triton's model here: ipc:///path or tcp://127.0.0.1:PORT.")  # fmt: skip
@observe_options
def serve(ranks: int | None, **fields: Any) -> None:
    """Serve over HTTP, with ranks of our own (--ranks N) or as ranks of an mpirun."""
    http = or_fail(lambda: take_settings(fields))
    options = ServeOptions(ranks=ranks or environment.mpi_size(), http=http, **fields)
    or_fail(lambda: _check(options))
    if environment.under_mpirun():
        serve_rank(options)
    sys.exit(or_fail(lambda: supervise(options)))


commands.add_command(calibrate_command)
commands.add_command(capacity_command)
commands.add_command(simulate_command)


commands.add_command(triton_repo)
commands.add_command(top_command)


@commands.command("serve-rank", hidden=True)
@click.argument("settings")
def rank(settings: str) -> None:
    """One rank of a supervised run; started by `serve` through mpirun."""
    decoded = msgspec.json.decode(settings, type=RankSettings)
    serve_rank(decoded.options, decoded.link_address, decoded.lifeline_path)


def _check(options: ServeOptions) -> None:
    """Everything that can be known before there are ranks."""
    options.check()
    model, _ = open_model(options)
    engine_config(options, model)
    if environment.mpi_rank() == 0:
        check_frontend(options)


def _refuse(message: str) -> NoReturn:
    rank = environment.mpi_rank()
    if rank != 0:
        time.sleep(OTHERS_WAIT_S)  # rank 0 knows the same, and once is enough
    place = f"rank {rank}: " if rank != 0 else ""
    sys.stderr.write(f"splash-trt: {place}{' '.join(message.split())}\n")
    sys.exit(EXIT_USAGE)
