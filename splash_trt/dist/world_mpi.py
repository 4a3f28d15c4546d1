"""The world of a rank that mpirun started. Importing this module initialises MPI."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
from types import TracebackType

import numpy as np
import torch
from mpi4py import MPI

from splash_trt.dist.board import ROW_BYTES, Board, Watch
from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.collectives_mpi import MpiCollectives
from splash_trt.dist.collectives_nccl import NcclCollectives
from splash_trt.dist.collectives_staged import StagedCollectives
from splash_trt.dist.control_mpi import OWN_CORES, SHARED_CORES, MpiControl
from splash_trt.dist.place import num_gpus, refuse
from splash_trt.dist.watchdog import Watchdog, last_words
from splash_trt.dist.world import CPU, World

EXIT_ERROR = 1


class MpiWorld:
    """This rank's `world`, guarded by a watchdog; construction and `close` are collective over all ranks.

    run_on is one of config.RUN_ON_WISHES; "auto" means GPUs if there is one for every rank on every node. The k-th rank
    of a node has GPU k; with "shared-gpu", GPU k modulo the node's number of GPUs. Raises ValueError if a node has too
    few GPUs for that.

    From here on, an uncaught exception on any thread, or an exit without `close`, ends all ranks (MPI alone would leave
    the others waiting).
    """

    def __init__(self, deadline_s: float, startup_deadline_s: float, run_on: str = "cpu") -> None:
        comm = MPI.COMM_WORLD
        self._node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        assert isinstance(self._node, MPI.Intracomm)
        self._window = MPI.Win.Allocate_shared(ROW_BYTES, 1, comm=self._node)
        watch = Watch(_board(self._node, self._window, comm.Get_rank()), comm.Get_rank())
        self._watchdog = Watchdog(watch, deadline_s, startup_deadline_s)
        self._watchdog.start()
        device, ranks_on_device = rank_device(comm, self._node, run_on)
        on_gpu = device.type == "cuda"
        patience = OWN_CORES if on_gpu else SHARED_CORES
        self._control = MpiControl(comm, watch, deadline_s, startup_deadline_s, patience)
        self._collectives: NcclCollectives | MpiCollectives
        if not on_gpu:
            self._collectives = MpiCollectives(comm, watch)
        elif ranks_on_device == 1:
            self._collectives = NcclCollectives(comm, watch, device, deadline_s)
        else:
            self._collectives = StagedCollectives(comm, watch, device)
        rank, size = comm.Get_rank(), comm.Get_size()
        self.world = World(rank, size, self._collectives, self._control, watch, device, ranks_on_device)
        sys.excepthook = self._uncaught
        threading.excepthook = lambda args: self.end_all(args.exc_value or args.exc_type())
        atexit.register(self._left_early)

    def close(self) -> bool:
        """Ends MPI and frees what the world holds, once every rank calls it.

        CUDA graphs that contain collectives must be gone. False if NCCL did not end in time: the caller should then end
        the process without Python's own clean-up, which may wait for NCCL again.
        """
        atexit.unregister(self._left_early)
        self.world.watch.ending()
        # The last wait for others that the watchdog guards: it reads the window, which is freed below.
        MPI.COMM_WORLD.Barrier()
        self._watchdog.stop()
        self.world.watch.detach()
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        self._control.close()
        ended = self._collectives.close()
        if not ended:
            last_words(f"rank {self.world.rank}: NCCL did not end in time, and is left to the end of the process")
        self._window.Free()
        self._node.Free()
        MPI.Finalize()
        return ended

    def end_all(self, error: BaseException, code: int = EXIT_ERROR) -> None:
        """Ends all ranks with `code`, and with this rank, its step and the cause on stderr. Does not return."""
        step = self.world.watch.step
        self.world.watch.failed()
        end_all(f"rank {self.world.rank}: {f'step {step}' if step >= 0 else 'before the first step'}", error, code)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.end_all(error)

    def _left_early(self) -> None:
        self.end_all(RuntimeError("the program ended without closing its world; the other ranks would wait for it"))


def end_all(place: str, error: BaseException, code: int = EXIT_ERROR) -> None:
    """Ends all ranks that mpirun started, after a line on stderr. A rank without an MpiWorld can call it too."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    last_words(f"{place}: {_in_words(error)}")
    MPI.COMM_WORLD.Abort(code)


def rank_device(comm: MPI.Intracomm, node: MPI.Intracomm, run_on: str) -> tuple[torch.device, int]:
    """What this rank computes on (see MpiWorld), and how many ranks share a GPU, at the most, on any node.

    node: the ranks of `comm` on this node. Collective.
    """
    if run_on == "cpu":
        return CPU, 1
    gpus, ranks = num_gpus(), node.Get_size()
    fewest = np.array([gpus - (1 if run_on == "shared-gpu" else ranks)], np.int64)
    spare = fewest.copy()
    comm.Allreduce(spare, fewest, MPI.MIN)
    if fewest[0] >= 0:
        sharing = np.array([-(-ranks // gpus)], np.int64)
        comm.Allreduce(sharing.copy(), sharing, MPI.MAX)
        return torch.device("cuda", node.Get_rank() % gpus), int(sharing[0])
    if run_on != "auto":
        if spare[0] < 0:
            refuse(run_on, ranks)
        needed, found = ("a GPU", "none") if run_on == "shared-gpu" else ("a GPU for each rank", "too few")
        raise ValueError(f"run_on: {run_on} needs {needed}, and another node has {found}")
    return CPU, 1


def _in_words(error: BaseException) -> str:
    """The error for stderr: with a traceback, unless it says all by itself, as another rank's failure does, or an error
    in what this rank loads."""
    if isinstance(error, RankFailure) and isinstance(error.__context__, ValueError | OSError | None):
        return str(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{type(error).__name__}: {error}\n{text.rstrip()}"


def _board(node: MPI.Intracomm, window: MPI.Win, rank: int) -> Board:
    """The node's board, zeroed. Its rows are those of the ranks on this node, by their global numbers."""
    ranks = np.zeros(node.Get_size(), np.int64)
    node.Allgather(np.array([rank], np.int64), ranks)
    memoryview(window.tomemory())[:] = bytes(ROW_BYTES)  # type: ignore[arg-type]
    node.Barrier()
    # By default a shared window is contiguous over all ranks, in their order.
    base, _ = window.Shared_query(0)
    memory = MPI.buffer.fromaddress(base.address, ROW_BYTES * len(ranks))
    return Board(memoryview(memory), ranks.tolist())  # type: ignore[arg-type]
