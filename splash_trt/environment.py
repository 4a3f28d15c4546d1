"""The only module that reads the process's environment variables; each function answers what other modules need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# The variables by which an MPI library or its launcher tells a process that it is a rank. Of Slurm's variables only
# those of the task: an mpirun needs the others, which describe the job.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
_TASK_PREFIXES = ("SLURM_STEP", "SLURM_PMIX", "SLURM_PROCID", "SLURM_LOCALID")

# Steps with higher ids are Slurm's own (a batch script or an interactive shell), whose variables may be those of the
# whole job.
_MAX_STEP_ID = 0xFFFFFFF0


def under_mpirun() -> bool:
    """Whether this process was started as a rank, by mpirun or by Slurm's srun --mpi=pmix."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ or _srun_tasks() > 1


def mpi_rank() -> int:
    """This process's rank under mpirun, before MPI is initialised; 0 if there is no mpirun."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
    if rank is None and _srun_tasks() > 1:
        rank = os.environ["PMIX_RANK"]
    return int(rank or 0)


def mpi_size() -> int:
    """The number of ranks of this mpirun; 1 if there is none."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or _srun_tasks())


def ranks_here() -> int | None:
    """The number of ranks of this mpirun on this node; None if the launcher does not say."""
    here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    return int(here) if here else None


def _srun_tasks() -> int:
    """The number of tasks of the srun that made this process a rank through PMIx (which does not tell it); otherwise 1.

    A task of `srun --mpi=none` has no PMIX_RANK. The only task of an srun is not a rank: it may start its own mpirun.
    """
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID")
    if step is None or int(step) > _MAX_STEP_ID or "PMIX_RANK" not in os.environ:
        return 1
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or 1)


def launcher_folder() -> Path | None:
    """Where this rank's mpirun keeps its temporary files, if it says so."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR")
    return Path(folder) if folder else None


def for_child() -> dict[str, str]:
    """This environment for a child process that is no rank: without a rank's variables, since a child that has them
    would take itself for the rank and disturb the run. In a process that is no rank, they are the user's and stay."""
    if not under_mpirun() and "PMIX_RANK" not in os.environ:
        return dict(os.environ)
    strangers = (*_LAUNCHER_PREFIXES, *_TASK_PREFIXES)
    return {name: value for name, value in os.environ.items() if not name.startswith(strangers)}


# Tensors of the same sizes are allocated and freed in every step. By default, glibc returns their memory to the system
# and requests it again each time, which costs a rank on CPUs a quarter of its time.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def for_mpirun() -> dict[str, str]:
    """This environment for a new mpirun. Open MPI refuses to run as root (as in containers) unless both variables are
    set."""
    environment = _KEEP_MEMORY | for_child()
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment


def search_path() -> str | None:
    """PATH, in which programs are looked for."""
    return os.environ.get("PATH")


@contextlib.contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """A context in which child processes find the programs in `folder` before all others."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = str(folder) if before is None else f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
