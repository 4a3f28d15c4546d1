"""A fault on one rank ends all of them: soon, with an exit code, and with rank, step and cause on stderr."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from splash_trt import environment
from splash_trt.launch import mpirun_command
from tests.mpi.world import ROOT, STARTUP_S

pytestmark = pytest.mark.mpi

DEADLINE_S = 4.0
END_S = 10.0  # from the fault to the end of the last process
SHARED = Path("/dev/shm")


@dataclass
class Ending:
    """How a run ended."""

    code: int
    stderr: str
    after_s: float
    """From the fault to the end of mpirun."""
    orphans: list[int]
    """Ranks still alive END_S after the fault."""
    leftovers: set[str]
    """Files in shared memory that no living process uses."""


def run_until_fault(name: str, folder: Path) -> Ending:
    before = set(os.listdir(SHARED))
    command = mpirun_command(3, [sys.executable, "-m", "tests.mpi.fault_program", name, str(DEADLINE_S)])
    env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1"}
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            code = process.wait(STARTUP_S + END_S)
        finally:
            process.kill()
    end = time.monotonic()
    stdout = (folder / "out").read_text()
    fault = re.search(r"fault at ([\d.]+)", stdout)
    assert fault is not None, (folder / "err").read_text(errors="replace")
    pids = [int(pid) for pid in re.findall(r"^pid (\d+)$", stdout, re.MULTILINE)]
    assert len(pids) == 3, stdout
    while (orphans := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < float(fault[1]) + END_S:
        time.sleep(0.1)
    for pid in orphans:
        psutil.Process(pid).kill()
    return Ending(
        code=code,
        stderr=(folder / "err").read_text(errors="replace"),
        after_s=end - float(fault[1]),
        orphans=orphans,
        leftovers=unused(set(os.listdir(SHARED)) - before),
    )


def unused(names: set[str]) -> set[str]:
    """Those that no process has mapped: other runs on this machine come and go meanwhile."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:
            continue  # the process has ended
        names = {name for name in names if f"{SHARED}/{name}" not in text}
    return {name for name in names if (SHARED / name).exists()}


def check(ending: Ending, code: int | None = None) -> None:
    assert ending.code != 0
    assert code is None or ending.code == code, ending
    assert ending.after_s < END_S, ending
    assert not ending.orphans, ending
    assert not ending.leftovers, ending


def test_an_exception(tmp_path: Path) -> None:
    ending = run_until_fault("exception", tmp_path)
    check(ending, code=1)
    assert "rank 1: step 5: LookupError: planted" in ending.stderr
    assert 'raise LookupError("planted")' in ending.stderr, "no traceback"


def test_a_killed_rank(tmp_path: Path) -> None:
    ending = run_until_fault("kill", tmp_path)
    check(ending, code=137)
    assert re.search(
        r"rank [02]: step 5: ended by SIGTERM in all_reduce \(layer 1\); "
        r"rank 1's process is gone \(step 5, computing, layer 1\)",
        ending.stderr,
    ), ending.stderr


def test_a_stopped_rank(tmp_path: Path) -> None:
    ending = run_until_fault("stop", tmp_path)
    check(ending, code=70)
    assert ending.after_s > DEADLINE_S - 1
    assert re.search(
        r"rank [02]: step 5: no progress for 4\.\d s in all_reduce \(layer 1\); "
        r"rank 1 is behind \(step 5, computing, layer 1, no sign of life for \d\.\d s\)",
        ending.stderr,
    ), ending.stderr


@pytest.mark.nightly
def test_a_rank_that_leaves_early(tmp_path: Path) -> None:
    ending = run_until_fault("exit", tmp_path)
    check(ending, code=1)
    assert "rank 1: step 5: SystemExit: 0" in ending.stderr


@pytest.mark.nightly
def test_a_script_that_ends_without_closing_its_world() -> None:
    program = """
from splash_trt.dist.world_mpi import MpiWorld
world = MpiWorld(deadline_s=60, startup_deadline_s=60).world
world.control.agree(None)
if world.rank != 0:
    world.control.receive()
"""
    command = mpirun_command(2, [sys.executable, "-c", program])
    done = subprocess.run(command, capture_output=True, text=True, env=environment.for_mpirun(), timeout=STARTUP_S)
    assert done.returncode == 1
    assert "rank 0: before the first step: RuntimeError: the program ended without closing its world" in done.stderr


@pytest.mark.nightly
def test_a_killed_mpirun(tmp_path: Path) -> None:
    ending = run_until_fault("mpirun", tmp_path)
    check(ending, code=-9)
