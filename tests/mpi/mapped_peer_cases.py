"""The peers' kernels, interpreted, between processes that map each other's memory: ranks meet and read as on GPUs."""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from splash_trt.dist.handles import on_one_host, share
from splash_trt.dist.world import World
from splash_trt.runtime.peers import Peers
from tests.mpi import peer_cases
from tests.mpi.peer_cases import Setting

Found = TypeVar("Found")
HALF = 4 << 20
PAGES = (6, 2, 4, 72)


class HostMemory:
    """What memory/device_memory.py's DeviceMemory is, of plain memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._fd = os.memfd_create("range")
        os.truncate(self._fd, num_bytes)
        self._maps: list[torch.Tensor] = []
        self.address = self.map(self._fd, num_bytes)
        self.bytes = self._maps[0]

    def export(self) -> int:
        return os.dup(self._fd)

    def map(self, fd: int, num_bytes: int) -> int:
        self._maps.append(torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8))
        return self._maps[-1].data_ptr()


def run_all(world: World, dtype: str, names: list[str]) -> list[str]:
    """Those of peer_cases.CASES that `names` names; returns them."""

    def program(peers: Peers, setting: Setting) -> list[str]:
        cases = [case for case in peer_cases.CASES if case.__name__ in names]
        for case in cases:
            case(peers, setting)
        return [case.__name__ for case in cases]

    return _mapped(world, dtype, program)


def run_pairs(world: World, dtype: str) -> int:
    """How many sums of pairs were compared."""

    def program(peers: Peers, setting: Setting) -> int:
        from tests.mpi import pair_cases  # its kernels are to be interpreted

        return pair_cases.sums_of_pairs(peers, setting)

    return _mapped(world, dtype, program)


def _mapped(world: World, dtype: str, program: Callable[[Peers, Setting], Found]) -> Found:
    # Makes Triton interpret the kernels that are imported after it.
    importlib.import_module("tests.kernels.conftest")
    from mpi4py import MPI

    from splash_trt.runtime.mailbox import Mapped, mailbox_bytes
    from splash_trt.runtime.peers_cuda import CudaPeers

    assert on_one_host(MPI.COMM_WORLD)
    # Pages lie elsewhere in each rank's arena, as they do where weights are cut unevenly.
    pages_at = [256 * (1 + rank) for rank in range(world.size)]
    mailbox, arena = HostMemory(mailbox_bytes(HALF)), HostMemory(1 << 20)
    addresses = [share(memory, MPI.COMM_WORLD, 30.0) for memory in (mailbox, arena)]
    peers = CudaPeers(
        world.rank,
        Mapped(mailbox.bytes, addresses[0]),
        HALF,
        Mapped(arena.bytes, addresses[1]),
        pages_at,
        num_blocks=5,
    )
    element = peer_cases.DTYPES[dtype]
    at = pages_at[world.rank]
    numel = torch.Size(PAGES).numel()
    pages = arena.bytes[at : at + numel * element.itemsize].view(element).view(PAGES)
    setting = peer_cases.Setting(dtype, pages=pages)
    found = program(peers, setting)
    MPI.COMM_WORLD.Barrier()  # nobody unmaps before all have read
    return found
