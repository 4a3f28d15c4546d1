"""`splash-trt calibrate`: starts ranks as `serve` does, and writes the result into the engine's folder.

Exit codes: 0; 130 after SIGINT and 143 after SIGTERM, when mpirun and its ranks have ended; 2 for what a user got
wrong; otherwise mpirun's own (that of the rank that died first), or 1. If this process is killed, its ranks notice by
their lifelines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch

from splash_engines.open import Engine, open_engine
from splash_trt import environment, lifeline
from splash_trt.calibrate.run import Calibration, calibrate, doubt, report
from splash_trt.config import DEFAULTS
from splash_trt.dist.place import choose, run_on_of
from splash_trt.dist.watchdog import last_words
from splash_trt.dist.world import CPU, ThreadWorld, World
from splash_trt.frontends import how_it_ended
from splash_trt.launch import end_mpirun, mpirun_command, run_under_mpi
from splash_trt.options import or_fail
from splash_trt.scheduler.devices import calibration_file, save_device

STEP_DEADLINE_S = 300.0
POLL_S = 0.1
EXIT_FAILED = 1
FOLDER_PREFIX = "splash-trt-"


def calibrate_engine(
    folder: Path,
    ranks: int | None,
    out: Path | None,
    minutes: float,
    dtype: str | None,
    run_on: str,
    lifeline_path: Path | None,
) -> None:
    """The command, with its options (commands/calibrate.py). lifeline_path: given to the ranks that `_start` starts."""
    if lifeline_path is not None:
        lifeline.hold(lifeline_path, f"rank {environment.mpi_rank()}")
    engine = or_fail(lambda: open_engine(folder))
    ranks = ranks or environment.mpi_size()
    path = out or calibration_file(folder, ranks)
    or_fail(lambda: _check(path, ranks))
    ranks_here = environment.ranks_here() if environment.under_mpirun() else ranks
    place = or_fail(lambda: choose(run_on, ranks_here))

    def program(world: World) -> int:
        default = DEFAULTS[run_on_of(world)].get("dtype", engine.model.dtype)
        result = calibrate(
            world, engine.model, engine.source, dtype=dtype or default, seconds=60 * minutes, progress=_say
        )
        if result is not None:
            _keep(result, path)
        return 0

    if environment.under_mpirun():
        run_under_mpi(program, STEP_DEADLINE_S, run_on=run_on)
    if ranks == 1:
        # Exit at once: an interpreter that shuts down in order while a rank's thread computes would abort.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os._exit(128 + number))
        ThreadWorld(1, STEP_DEADLINE_S, torch.device("cuda", 0) if place == "gpu" else CPU).run(program)
        return
    sys.exit(_start(engine, ranks, path, minutes, dtype, place if run_on == "auto" else run_on))


def _check(path: Path, ranks: int) -> None:
    started = environment.mpi_size()
    if environment.under_mpirun() and ranks != started:
        raise ValueError(f"ranks: {ranks} asked for, but mpirun starts {started}; leave it out")
    if not path.parent.is_dir():
        raise ValueError(f"out: {path.parent} is not a folder; make it first")


def _start(engine: Engine, ranks: int, path: Path, minutes: float, dtype: str | None, run_on: str) -> int:
    """Run this command as the ranks of an mpirun; returns the exit code."""
    signals: list[int] = []
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        line_path = Path(folder) / "lifeline"
        argv = [sys.executable, "-m", "splash_trt", "calibrate", "--engine", str(engine.folder), "--out", str(path)]
        argv += ["--minutes", str(minutes), "--lifeline", str(line_path), "--run-on", run_on]
        argv += ["--dtype", dtype] if dtype else []
        command = or_fail(lambda: mpirun_command(ranks, argv, on_gpus=run_on.endswith("gpu")))
        line = lifeline.Lifeline(line_path)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: signals.append(number))
        # In a session of its own, so that Ctrl-C reaches this process only, which ends the ranks and waits for them.
        mpirun = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment.for_mpirun(), start_new_session=True
        )
        try:
            while not signals and mpirun.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    mpirun.wait(POLL_S)
        finally:
            end_mpirun(mpirun, 0.0)
            line.close()
    if signals:
        return 128 + signals[0]
    if mpirun.returncode < 0:
        last_words(f"splash-trt: mpirun {how_it_ended(mpirun.returncode)}")
        return EXIT_FAILED
    return mpirun.returncode


def _keep(result: Calibration, path: Path) -> None:
    save_device(result.device, path)
    click.echo(report(result))
    click.echo(f"Wrote {path}")
    about = doubt(result)
    if about is not None:
        _say(about)


def _say(text: str) -> None:
    click.echo(f"calibrate: {text}", err=True)
