"""`splash-trt calibrate`: starts ranks as `serve` does, and keeps what was found beside the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from splash_engines.open import Engine, open_engine
from splash_trt import environment
from splash_trt.calibrate.run import Calibration, calibrate, report
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.launch import mpirun_command, run_under_mpi
from splash_trt.options import or_fail
from splash_trt.scheduler.devices import calibration_file, save_device

STEP_DEADLINE_S = 300.0


def calibrate_engine(folder: Path, ranks: int | None, out: Path | None, minutes: float, dtype: str | None) -> None:
    """The command (splash_trt/commands/calibrate.py), by its options."""
    engine = or_fail(lambda: open_engine(folder))
    ranks = ranks or environment.mpi_size()
    path = out or calibration_file(folder, ranks)
    or_fail(lambda: _check(path, ranks))

    def program(world: World) -> int:
        result = calibrate(
            world, engine.model, engine.source, dtype=dtype or engine.model.dtype, seconds=60 * minutes, progress=_say
        )
        if result is not None:
            _keep(result, path)
        return 0

    if environment.under_mpirun():
        run_under_mpi(program, STEP_DEADLINE_S)
    if ranks == 1:
        ThreadWorld(1, STEP_DEADLINE_S).run(program)
        return
    sys.exit(_start(engine, ranks, path, minutes, dtype))


def _check(path: Path, ranks: int) -> None:
    started = environment.mpi_size()
    if environment.under_mpirun() and ranks != started:
        raise ValueError(f"ranks: {ranks} asked for, but mpirun starts {started}; leave it out")
    if not path.parent.is_dir():
        raise ValueError(f"out: {path.parent} is not a folder; make it first")


def _start(engine: Engine, ranks: int, path: Path, minutes: float, dtype: str | None) -> int:
    """Run this command as the ranks of an mpirun; its exit code."""
    argv = [sys.executable, "-m", "splash_trt", "calibrate", "--engine", str(engine.folder)]
    argv += ["--out", str(path), "--minutes", str(minutes), *(["--dtype", dtype] if dtype else [])]
    command = or_fail(lambda: mpirun_command(ranks, argv))
    return subprocess.run(command, stdin=subprocess.DEVNULL, env=environment.for_mpirun()).returncode


def _keep(result: Calibration, path: Path) -> None:
    save_device(result.device, path)
    click.echo(report(result))
    click.echo(f"Wrote {path}")


def _say(text: str) -> None:
    click.echo(f"calibrate: {text}", err=True)
