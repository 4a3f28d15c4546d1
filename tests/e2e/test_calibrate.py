"""Whatever ends `splash-trt calibrate --ranks N`, its ranks end with it and nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e.servers import SPLASH, START_S, Run, wait_until

pytestmark = pytest.mark.mpi

END_S = 10.0
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
MEASURING = "calibrate: "
STARTING = "starting"


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGTERM, MEASURING),
        (signal.SIGKILL, MEASURING),
        pytest.param(signal.SIGINT, MEASURING, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, STARTING, marks=pytest.mark.nightly),
    ],
)
def test_an_end_from_outside(engine: Path, number: signal.Signals, when: str) -> None:
    flags = ["--engine", str(engine), "--ranks", "2", "--dtype", "float32", "--out", str(engine.parent / "device.json")]
    run = Run([*SPLASH, "calibrate", *flags])
    try:
        wait_until(lambda: ranks(run) == 2, START_S, "two ranks")
        if when == MEASURING:
            wait_until(lambda: MEASURING in run.log, START_S, "the first cells")
        run.look()
        os.killpg(run.process.pid, number)  # as a terminal does
        wait_until(lambda: not run.alive(), END_S, f"all gone\n{run.log}")
        assert not run.leftovers(), run.log
        assert run.process.wait() == EXIT_CODES[number], run.log
        assert "Traceback" not in run.log, run.log
        assert not (engine.parent / "device.json").exists()
    finally:
        run.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_rank(engine: Path, number: signal.Signals) -> None:
    run = Run([*SPLASH, "calibrate", "--engine", str(engine), "--ranks", "1", "--out", str(engine.parent / "one.json")])
    try:
        wait_until(lambda: MEASURING in run.log, START_S, "the first cells")
        run.process.send_signal(number)
        assert run.process.wait(END_S) == EXIT_CODES[number], run.log
        assert "Traceback" not in run.log and not run.leftovers() and not (engine.parent / "one.json").exists()
    finally:
        run.close()


def ranks(run: Run) -> int:
    """Ranks that have begun."""
    assert run.process.poll() is None, run.log
    run.look()
    return sum(is_rank(process) for process in run.alive())


def is_rank(process: psutil.Process) -> bool:
    try:
        return "OMPI_COMM_WORLD_RANK" in process.environ()
    except psutil.Error:  # it has just ended
        return False
