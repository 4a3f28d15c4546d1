"""`splash-trt calibrate`'s options."""

from __future__ import annotations

from pathlib import Path

import click

from splash_trt.options import DTYPE_NAMES, Number, run_on_option


@click.command("calibrate")
@click.option("--engine", "folder", type=click.Path(path_type=Path), required=True, help="Engine folder.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to start; under mpirun its -n says it.")
@click.option("--out", type=click.Path(path_type=Path), help="Default: device-RANKS.json in the engine's folder.")
@click.option("--minutes", type=Number(0.05, 1440), default=3.0, show_default=True, help="Time to measure for.")
@click.option("--dtype", type=click.Choice(DTYPE_NAMES), help="Default: the checkpoint's; on GPUs bfloat16.")
@run_on_option
@click.option("--lifeline", "lifeline_path", type=click.Path(path_type=Path), hidden=True)
def calibrate_command(
    folder: Path,
    ranks: int | None,
    out: Path | None,
    minutes: float,
    dtype: str | None,
    run_on: str,
    lifeline_path: Path | None,
) -> None:
    """Measure steps under every layout, and fit the description of this machine that the scheduler decides by."""
    from splash_trt.calibrate.command import calibrate_engine

    calibrate_engine(folder, ranks, out, minutes, dtype, run_on, lifeline_path)
