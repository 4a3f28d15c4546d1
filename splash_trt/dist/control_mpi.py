"""The control channel over MPI, on a private communicator; buffers only, no pickle.

Waits poll instead of blocking inside MPI: so an idle rank leaves its core alone, whatever the MPI library does, and a
wait whose deadline passes can name the rank that it waited for.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from mpi4py import MPI

from splash_trt.dist.board import Phase, Watch
from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.control import Control, Kind, Message

MAX_BEHIND = 4  # messages that a rank may lag behind before rank 0 waits for it
_STATUS_TAG = 99  # of messages in `agree`; other messages have their Kind as a tag
_MAX_STATUS_BYTES = 2000  # short enough for MPI to send at once, whether or not the receiver is ready

_BRISK_PAUSE_S, _IDLE_PAUSE_S = 50e-6, 1e-3


@dataclass(frozen=True)
class Patience:
    """How a rank polls: for spin_s without a pause, until brisk_s every 50 us, and from then on every millisecond,
    which takes 2 % of a core."""

    spin_s: float
    brisk_s: float
    """Counted from the begin of the wait, like spin_s."""


SHARED_CORES = Patience(spin_s=0.0, brisk_s=0.005)
"""For ranks that compute on CPU cores, which they may have to share."""
OWN_CORES = Patience(spin_s=0.2, brisk_s=2.0)
"""For ranks that compute on GPUs: a plan that is noticed late leaves the GPU idle, and the core has no other work."""


class MpiControl(Control):
    """One rank's end; the constructor and `close` are collective over `comm`."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        watch: Watch,
        deadline_s: float,
        startup_deadline_s: float,
        patience: Patience = SHARED_CORES,
    ) -> None:
        self._patience = patience
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._comm = comm.Dup()
        self._watch = watch
        self._deadline_s = deadline_s
        self._startup_deadline_s = startup_deadline_s
        # For each rank the sends that it has not received yet, oldest first. An MPI request keeps its buffer alive.
        self._sent: list[deque[MPI.Request]] = [deque() for _ in range(self.size)]

    def close(self) -> None:
        """Frees the communicator."""
        self._comm.Free()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        assert self.rank == 0, self.rank
        self._watch.enter(Phase.CONTROL)
        for rank in range(1, self.size):
            # Synchronous: completes when the rank receives it, so that `_sent` tells how far behind the rank is.
            self._sent[rank].append(self._comm.Issend([payload, MPI.BYTE], rank, int(kind)))
        self._await_taken(0 if kind is Kind.STOP else MAX_BEHIND)
        self._watch.leave()

    def progress(self) -> None:
        for sent in self._sent:
            while sent and sent[0].Test():
                sent.popleft()

    def settle(self) -> None:
        self._watch.enter(Phase.CONTROL)
        self._await_taken(0)
        self._watch.leave()

    def receive(self) -> Message:
        assert self.rank != 0
        self._watch.idle()
        status = MPI.Status()
        pause = _Pause(self._patience)
        while (found := self._comm.Improbe(0, MPI.ANY_TAG, status)) is None:
            pause()
        payload = bytearray(status.Get_count(MPI.BYTE))
        found.Recv([payload, MPI.BYTE])
        self._watch.leave()
        return Message(Kind(status.Get_tag()), bytes(payload))

    def agree(self, error: str | None) -> None:
        own = (error or "").encode()[:_MAX_STATUS_BYTES]
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Idle for the watchdog: this wait has its own deadline, startup_deadline_s.
        self._watch.idle()
        sends = [self._comm.Isend([own, MPI.BYTE], rank, _STATUS_TAG) for rank in others]
        if error is None:
            self._await_statuses(set(others))
        MPI.Request.Waitall(sends)
        if error is not None:
            raise RankFailure(self.rank, f"start-up failed on rank {self.rank}: {error}")
        self._watch.end_step()

    def _await_statuses(self, missing: set[int]) -> None:
        end = time.monotonic() + self._startup_deadline_s
        status = MPI.Status()
        pause = _Pause(self._patience)
        while missing:
            found = self._comm.Improbe(MPI.ANY_SOURCE, _STATUS_TAG, status)
            if found is not None:
                text = bytearray(status.Get_count(MPI.BYTE))
                found.Recv([text, MPI.BYTE])
                rank = status.Get_source()
                missing.discard(rank)
                if text:
                    raise RankFailure(rank, f"start-up failed on rank {rank}: {text.decode(errors='replace')}")
            elif time.monotonic() > end:
                raise RankFailure(
                    min(missing), f"start-up: waited {self._startup_deadline_s:g} s for {_names(missing)}"
                )
            else:
                pause()

    def _await_taken(self, limit: int) -> None:
        """Waits until no rank has more than `limit` messages to receive."""
        end = time.monotonic() + self._deadline_s
        pause = _Pause(self._patience)
        while True:
            self.progress()
            behind = {rank for rank, sent in enumerate(self._sent) if len(sent) > limit}
            if not behind:
                return
            if time.monotonic() > end:
                raise RankFailure(
                    min(behind),
                    f"step {self._watch.step}: {_names(behind)} took no message for {self._deadline_s:g} s",
                )
            pause()


class _Pause:
    """Sleeps between two polls of one wait, as Patience says."""

    def __init__(self, patience: Patience) -> None:
        begin = time.monotonic()
        self._spin_end = begin + patience.spin_s
        self._brisk_end = begin + patience.brisk_s

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._spin_end:
            time.sleep(_BRISK_PAUSE_S if now < self._brisk_end else _IDLE_PAUSE_S)


def _names(ranks: set[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
