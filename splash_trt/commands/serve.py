"""`splash-trt serve`, and `serve-rank` for its ranks."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from splash_trt import environment, interruption
from splash_trt.config import MAX_DEADLINE_S, OPERATORS, SIMULATED_ROUTING
from splash_trt.frontend.options import http_options, take_settings
from splash_trt.observe.options import observe_options
from splash_trt.options import DTYPE_NAMES, Number, Size, experts_option, or_fail, run_on_option

OBJECTIVE_HELP = "What auto goes for: throughput, latency, or bounded:MS (throughput, p99 per token at most MS)."
MEMORY_HELP = "One rank's arena: weights, workspaces and cache; default on GPUs: 85 % of the smallest one's memory."
ROUTING_HELP = "Random experts instead of the router's, for performance work with random weights; outputs are nonsense."
OPERATORS_HELP = "On GPUs: our own kernels alone, or auto: TensorRT-LLM's too where they are right and faster."
DEVICE_HELP = "The devices' description that auto decides by; default: the engine's calibration, else this machine."


@click.command("serve")
@click.option("--engine", help="Engine folder, made by `splash-trt build`.")
@click.option("--model", help="Folder with a config.json, for --dummy-weights.")
@click.option("--dummy-weights", type=int, metavar="SEED", help="Random weights of the model's sizes; no tokenizer.")
@click.option("--load", type=click.Choice(["dummy"]), help="dummy: short for --dummy-weights 0.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to start; under mpirun its -n says it.")
@run_on_option
@click.option(
    "--layout", type=click.Choice(["auto", "tp", "dp", "cp", "dop"]), default="auto", show_default=True,
    help="auto follows the load; another is where it starts and stays until an operator switches.",
)  # fmt: skip
@click.option("--objective", default="throughput", show_default=True, metavar="GOAL", help=OBJECTIVE_HELP)
@click.option("--device", metavar="NAME|FILE", help=DEVICE_HELP)
@click.option("--dtype", type=click.Choice(DTYPE_NAMES), help="Default: the checkpoint's; on GPUs bfloat16.")
@click.option("--memory", "memory_bytes", type=Size(), help=MEMORY_HELP)
@click.option("--simulate-routing", type=click.Choice(SIMULATED_ROUTING[1:]), help=ROUTING_HELP)
@experts_option
@click.option("--operators", type=click.Choice(OPERATORS), default="auto", show_default=True, help=OPERATORS_HELP)
@click.option("--page-tokens", type=int, default=64, show_default=True, help="Tokens in a cache page.")
@click.option("--max-batch-tokens", type=int, help="Most tokens in one step; default: 2048, on GPUs 8192.")
@click.option("--max-running", type=int, help="Most requests that hold cache; default: 256, on GPUs 512.")
@click.option("--max-context", type=int, help="Longest prompt + output; default: the model's.")
@click.option("--step-deadline", "step_deadline_s", type=Number(0, MAX_DEADLINE_S, above=True), default=60.0,
              show_default=True, metavar="SECONDS", help="A rank that is longer in one step ends the run.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="0: any free one; the log says which.")  # fmt: skip
@click.option("--name", help="The model's name in the API; default: the folder's.")
@http_options
@click.option("--client-endpoint", metavar="ADDRESS",
              help="Serve Triton's model here: ipc:///path or tcp://127.0.0.1:PORT.")  # fmt: skip
@observe_options
def serve_command(ranks: int | None, load: str | None, **fields: Any) -> None:
    """Serve over HTTP, with ranks of our own (--ranks N) or as ranks of an mpirun."""
    from splash_trt.serve import ServeOptions, check_before_ranks, serve_rank
    from splash_trt.supervise import supervise

    if load == "dummy" and fields["dummy_weights"] is None:
        fields["dummy_weights"] = 0
    http = or_fail(lambda: take_settings(fields))
    options = ServeOptions(ranks=ranks or environment.mpi_size(), http=http, **fields)
    or_fail(lambda: check_before_ranks(options))
    if environment.under_mpirun():
        serve_rank(options)
    code = or_fail(lambda: supervise(options))
    interruption.over()
    sys.exit(code)


@click.command("serve-rank", hidden=True)
@click.argument("settings")
def rank_command(settings: str) -> None:
    """One rank of a supervised run; started by `serve` through mpirun."""
    from splash_trt.serve import serve_rank
    from splash_trt.supervise import RankSettings

    decoded = msgspec.json.decode(settings, type=RankSettings)
    serve_rank(decoded.options, decoded.link_address, decoded.lifeline_path)
