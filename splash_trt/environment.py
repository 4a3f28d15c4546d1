"""The one module that reads the process's environment. What the others need of it has a name here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# How an MPI library and its launcher tell a process that it is a rank. Of Slurm's variables those of the task alone: an
# mpirun needs the others, which say what the job has.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
_TASK_PREFIXES = ("SLURM_STEP", "SLURM_PMIX", "SLURM_PROCID", "SLURM_LOCALID")

# Slurm's own steps have higher ids: a batch script, or an interactive shell, whose variables may be the whole job's.
_MAX_STEP_ID = 0xFFFFFFF0


def under_mpirun() -> bool:
    """Whether mpirun started this process, as one rank of its run, or Slurm's srun did so with --mpi=pmix."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ or _srun_tasks() > 1


def mpi_rank() -> int:
    """This process's rank under mpirun, known before MPI is initialised; 0 elsewhere."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
    if rank is None and _srun_tasks() > 1:
        rank = os.environ["PMIX_RANK"]
    return int(rank or 0)


def mpi_size() -> int:
    """Ranks of this mpirun; 1 elsewhere."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or _srun_tasks())


def ranks_here() -> int | None:
    """Ranks of this mpirun on this node; None: the launcher does not say."""
    here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    return int(here) if here else None


def _srun_tasks() -> int:
    """Tasks of the srun that gave this process a rank through PMIx, which says nothing of their number; 1 elsewhere.

    A task of `srun --mpi=none` has no PMIX_RANK. One of a single task is no rank: it may start an mpirun of its own.
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
    """This environment for a process that is no rank: one that inherited a rank's variables would take them for its
    own and disturb the run. Outside of a run, what is set for MPI is the user's and stays."""
    if not under_mpirun() and "PMIX_RANK" not in os.environ:
        return dict(os.environ)
    strangers = (*_LAUNCHER_PREFIXES, *_TASK_PREFIXES)
    return {name: value for name, value in os.environ.items() if not name.startswith(strangers)}


# Tensors of the same sizes come and go in every step. Left to itself, glibc gives their memory back to the system and
# asks for it again each time, which costs a CPU rank a quarter of its time.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def for_mpirun() -> dict[str, str]:
    """This environment for a new mpirun. Open MPI refuses to run as root (the user in a container) until told twice."""
    environment = _KEEP_MEMORY | for_child()
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment


def search_path() -> str | None:
    """Where to look for programs."""
    return os.environ.get("PATH")


@contextlib.contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Meanwhile, what this process starts finds the programs in `folder` before all others."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = str(folder) if before is None else f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
