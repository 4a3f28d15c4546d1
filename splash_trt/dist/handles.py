"""Lets the ranks of one host map each other's memory: they pass file descriptors of it over Unix sockets.

MPI cannot carry a file descriptor; a Unix socket can. Each rank listens at an abstract address (no file to clean up)
that the others learn through MPI, sends its descriptor to each of them and receives theirs. Connections of any other
process are refused: the kernel tells the pid at the other end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from splash_trt.dist.collectives import RankFailure

if TYPE_CHECKING:
    from mpi4py import MPI

_CALL = np.dtype([("address", "S64"), ("pid", "i8"), ("num_bytes", "i8")])
_RANK = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Mappable(Protocol):
    """A range of memory that other processes can map; memory/device_memory.py has those of GPUs."""

    address: int
    num_bytes: int

    def export(self) -> int:
        """A file descriptor of the range, for the caller to close."""
        ...

    def map(self, fd: int, num_bytes: int) -> int:
        """Maps a peer's range, given by its descriptor and size; returns the address of it in this process."""
        ...


def on_one_host(comm: MPI.Intracomm) -> bool:
    """Whether all ranks of comm can share memory. Collective."""
    from mpi4py import MPI  # not at the top: importing it initialises MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    same = node.Get_size() == comm.Get_size()
    node.Free()
    return bool(same)


def share(memory: Mappable, comm: MPI.Intracomm, deadline_s: float) -> tuple[int, ...]:
    """Maps the `memory` of all ranks of comm; returns their addresses in this process, in rank order, its own included.

    Collective over comm, whose ranks are on one host. What any rank wrote into its memory before its call is visible
    when this returns. RankFailure names a rank that does not come within the deadline.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    end = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"splash-trt-{os.getpid()}-{secrets.token_hex(8)}"
        listener.bind(b"\0" + name.encode())
        listener.listen(size + 8)
        calls = np.zeros(size, _CALL)
        own = np.array([(name.encode(), os.getpid(), memory.num_bytes)], _CALL)
        comm.Allgather(own.view(np.uint8), calls.view(np.uint8))
        fd = memory.export()
        try:
            for peer in range(size):
                if peer != rank:
                    _give(fd, rank, peer, calls, end)
        finally:
            os.close(fd)
        fds = _take(listener, rank, calls["pid"].tolist(), end)
    addresses = []
    for peer in range(size):
        addresses.append(memory.address if peer == rank else memory.map(fds[peer], int(calls["num_bytes"][peer])))
    for received in fds.values():
        os.close(received)
    return tuple(addresses)


def _give(fd: int, rank: int, peer: int, calls: np.ndarray, end: float) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(max(end - time.monotonic(), 0.001))
        try:
            link.connect(b"\0" + bytes(calls["address"][peer]))
            socket.send_fds(link, [_RANK.pack(rank)], [fd])
        except OSError as error:
            raise RankFailure(peer, f"rank {peer} does not take the memory of rank {rank}: {error}") from None


def _take(listener: socket.socket, rank: int, pids: Sequence[int], end: float) -> dict[int, int]:
    """{rank: descriptor} of every other rank. pids: of all ranks, in rank order."""
    fds: dict[int, int] = {}
    missing = set(range(len(pids))) - {rank}
    while missing:
        listener.settimeout(max(end - time.monotonic(), 0.001))
        try:
            link, _ = listener.accept()
            with link:
                link.settimeout(max(end - time.monotonic(), 0.001))
                pid, _, _ = _CREDENTIALS.unpack(
                    link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if pid not in pids:
                    continue
                data, received, _, _ = socket.recv_fds(link, _RANK.size, 1)
        except TimeoutError:
            late = min(missing)
            raise RankFailure(late, f"rank {late} has not given its memory to rank {rank} in time") from None
        if len(data) != _RANK.size:
            late = pids.index(pid)
            raise RankFailure(late, f"rank {late} has left while it gave its memory to rank {rank}")
        (peer,) = _RANK.unpack(data)
        assert peer in missing and pids[peer] == pid and len(received) == 1, (peer, pid, received)
        fds[peer] = received[0]
        missing.discard(peer)
    return fds
