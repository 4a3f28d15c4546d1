"""CudaPeers on GPUs, one per rank: the cases that all peers share, and captured steps among launches of other kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from splash_trt.dist.world import World
from splash_trt.runtime.peers import Peers
from tests.mpi import peer_cases
from tests.mpi.gpu_world import device_of
from tests.mpi.peer_cases import EPS, Setting, filled, stacked

HALF = 64 << 20
PAGES = (6, 2, 4, 72)
WIDTH = 2048


def run_all(world: World, dtype: str) -> int:
    """Every case of peer_cases."""
    return _on_gpu(world, dtype, lambda peers, setting: len([case(peers, setting) for case in peer_cases.CASES]))


def run_pairs(world: World, dtype: str) -> int:
    """How many sums of pairs were compared."""

    def program(peers: Peers, setting: Setting) -> int:
        from tests.mpi import pair_cases  # needs Triton

        return pair_cases.sums_of_pairs(peers, setting)

    return _on_gpu(world, dtype, program)


def run_replays(world: World, replays: int) -> int:
    """The numbers that were wrong in `replays` of a captured step, with other calls in between."""
    return _on_gpu(world, "bfloat16", lambda peers, setting: wrong_in_replays(peers, setting, replays))


def wrong_in_replays(peers: Peers, s: Setting, replays: int) -> int:
    rows = [1, 31, 400]  # the sums of the last are read, those of the others pushed
    steps = [Step(peers, s, count) for count in rows]
    for step in steps:  # compiles
        step()
    graphs = []
    for step in steps:
        torch.cuda.synchronize(s.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graphs.append(graph)
    order = torch.randint(0, len(steps), (replays,), generator=torch.Generator().manual_seed(7)).tolist()
    for i, which in enumerate(order):
        if i % 5 == 4:
            steps[which]()
        else:
            graphs[which].replay()
        if i % 50 == 0:
            for step in steps:
                step.change(i)
    torch.cuda.synchronize(s.device)
    return sum(int(step.wrong) for step in steps)


class Step:
    """Sums, gathers and picks of `rows` rows from inputs that `change` changes; `wrong` counts what came out wrong."""

    def __init__(self, peers: Peers, s: Setting, rows: int) -> None:
        self._peers, self._s = peers, s
        self._counts = [rows + rank for rank in range(peers.size)]
        total = sum(self._counts)
        self._offsets = s.ints(stacked(self._counts))
        self._parts = torch.empty((peers.size, total, WIDTH), dtype=s.dtype, device=s.device)
        self._hidden = torch.empty((total, WIDTH), dtype=s.dtype, device=s.device)
        self._rank = s.ints(s.below(rows, peers.size, 17))
        self._row = s.ints(s.below(rows + 1, rows, 17))
        self._weight = s.random(5, (WIDTH,))
        self.wrong = torch.zeros((), dtype=torch.int64, device=s.device)
        self.change(0)

    def change(self, seed: int) -> None:
        generator = torch.Generator(self._s.device).manual_seed(1000 + seed)  # the same numbers on all ranks
        self._parts.normal_(generator=generator)
        self._hidden.normal_(generator=generator)

    def __call__(self) -> None:
        peers, parts, me, at = self._peers, self._parts, self._peers.rank, self._offsets
        mine = slice(sum(self._counts[:me]), sum(self._counts[: me + 1]))
        peers.begin()
        total = peer_cases.total_of(list(parts))
        expected = self._hidden + total
        hidden = self._hidden.clone()
        peers.sum_rows(filled(peers, parts[me]), None, None, hidden, self._weight, EPS)
        self._check(hidden, expected)
        own = self._hidden[mine].clone()
        peers.sum_rows(filled(peers, parts[me]), self._counts, at, own, None, EPS)
        self._check(own, expected[mine])
        self._check(peers.gather_rows(filled(peers, own), self._counts, at, len(hidden)), expected)
        picked = peers.pick_rows(filled(peers, parts[me]), self._rank, self._row)
        self._check(picked, parts[self._rank.long(), self._row.long()])
        few = parts[:, :3, :2].double()
        self._check(peers.gather_small(few[me]), few)

    def _check(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self.wrong += (actual != expected).sum()


def _on_gpu(world: World, dtype: str, program: Callable[[Peers, Setting], int]) -> int:
    # These make a rank of the process that imports them, or exist on machines with a GPU only.
    from mpi4py import MPI

    from splash_trt.memory.device_memory import DeviceMemory
    from splash_trt.runtime.peers_cuda import connect, reachable

    device = device_of(world)
    torch.cuda.set_device(device)
    if not reachable(MPI.COMM_WORLD, device):
        raise AssertionError("these GPUs cannot read each other's memory")
    # Pages lie elsewhere in each rank's arena, as they do where weights are cut unevenly.
    pages_at = [256 * (1 + rank) for rank in range(world.size)]
    arena = DeviceMemory(1 << 20, device)
    peers, mailbox = connect(MPI.COMM_WORLD, device, HALF, arena, pages_at, 60.0)
    element = peer_cases.DTYPES[dtype]
    at = pages_at[world.rank]
    pages = arena.bytes[at : at + torch.Size(PAGES).numel() * element.itemsize].view(element).view(PAGES)
    found = program(peers, Setting(dtype, device, pages))
    torch.cuda.synchronize(device)
    MPI.COMM_WORLD.Barrier()  # nobody unmaps before all have read
    for memory in (mailbox, arena):
        memory.close()
    return found
