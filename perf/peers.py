"""Checks and times the exchanges between ranks on GPUs inside a step, with one GPU for each rank.

    mpirun -n 2 python -m perf.peers

Prints the microseconds of each operation, launched one by one and inside a CUDA graph, and the rate at which bytes came
from the other ranks. The exit code is 1 if a check fails; if it hangs, it ends by itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from splash_trt.dist.handles import share
from splash_trt.dist.rank_sum import even_split
from splash_trt.memory.device_memory import DeviceMemory, copy
from splash_trt.runtime.mailbox import SLOT_BYTES, Mapped
from splash_trt.runtime.peers import Peers
from splash_trt.runtime.peers_cuda import PUSH_BYTES, CudaPeers, connect, reachable
from tests.mpi import gpu_peer_cases, peer_cases

D, H, W, L, PAGE = 2048, 20, 576, 512, 64
"""The sizes of glm-4.7-flash: hidden, heads, row width, latent; and tokens of a page."""
BF16 = torch.bfloat16
HALF = 96 << 20
ARENA = 512 << 20
REPEATS = 20

Operation = Callable[[Peers], object]


class Bench:
    """This rank's peers, and operations to be timed with them."""

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.arena = DeviceMemory(ARENA, device)
        self.offsets = [256 * (1 + rank) for rank in range(self.size)]
        self.peers, self.mailbox = connect(comm, device, HALF, self.arena, self.offsets, 60.0)
        # For peers over the same memory with other settings (`variant`). `begin` is called between the uses of any two.
        self.mapped = [Mapped(m.bytes, share(m, comm, 60.0)) for m in (self.mailbox, self.arena)]
        self.heads = even_split(H, self.size)

    def variant(self, push_bytes: int, num_blocks: int = 128) -> CudaPeers:
        mailbox, arena = self.mapped
        return CudaPeers(self.rank, mailbox, HALF, arena, self.offsets, num_blocks, push_bytes)

    def check(self) -> None:
        at = self.offsets[self.rank]
        for name in ("bfloat16", "float32"):
            dtype = peer_cases.DTYPES[name]
            shape = torch.Size(gpu_peer_cases.PAGES)
            pages = self.arena.bytes[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for peers in (self.peers, self.variant(0, 64)):
                peers.begin()
                for case in peer_cases.CASES:
                    case(peers, peer_cases.Setting(name, self.device, pages))
        self.peers.begin()
        setting = peer_cases.Setting("bfloat16", self.device)
        wrong = gpu_peer_cases.wrong_in_replays(self.peers, setting, 1000)
        assert wrong == 0, f"{wrong} numbers are wrong in replays of captured steps"

    def spread(self, rows: int) -> tuple[list[int], torch.Tensor]:
        counts = even_split(rows, self.size)
        return counts, self.ints(peer_cases.stacked(counts))

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def operations(self, rows: int) -> dict[str, tuple[Operation, int]]:
        """By name: an operation on `rows` rows over all ranks, and the bytes that this rank gets from others by it."""
        counts, at = self.spread(rows)
        mine, others = counts[self.rank], rows - counts[self.rank]
        hidden = torch.randn(rows, D, device=self.device).to(BF16)
        own = hidden[:mine].clone()
        weight = torch.ones(D, dtype=BF16, device=self.device)
        ranks = self.ints([i % self.size for i in range(rows)])
        places = self.ints([i // self.size for i in range(rows)])
        whole = (self.size - 1) * rows * D * 2 if self.size == 2 else 2 * (self.size - 1) * rows * D * 2 // self.size
        found: dict[str, tuple[Operation, int]] = {
            "sum": (lambda p: p.sum_rows(p.buffer((rows, D), BF16), None, None, hidden, weight, 1e-5), whole),
            "sum, spread": (
                lambda p: p.sum_rows(p.buffer((rows, D), BF16), counts, at, own, weight, 1e-5),
                (self.size - 1) * mine * D * 2,
            ),
            "gather": (lambda p: p.gather_rows(p.buffer((mine, D), BF16), counts, at, rows), others * D * 2),
        }
        if rows <= 512:
            h = self.heads[self.rank]
            owned = self.ints(range(self.rank, rows, self.size))
            found |= {
                "to owners": (
                    lambda p: p.to_owners(p.buffer((rows, h, W), BF16), owned, self.heads),
                    len(owned) * (H - h) * W * 2,
                ),
                "to heads": (
                    lambda p: p.to_heads(p.buffer((mine, H, L), BF16), ranks, places, self.heads),
                    (rows - len(owned)) * h * L * 2,
                ),
                "merge": (lambda p: self.merge(p, rows, counts, at), (self.size - 1) * mine * H * (L * 2 + 4)),
                "pick": (lambda p: p.pick_rows(p.buffer((rows, D), BF16), ranks, places), others * D * 2),
                "small": (
                    lambda p: p.gather_small(torch.zeros((rows, 8), dtype=torch.float64, device=self.device)),
                    (self.size - 1) * rows * 64,
                ),
            }
        else:
            pages = self.arena.bytes[self.offsets[self.rank] :][: 256 * PAGE * W * 2].view(BF16).view(256, PAGE, W)
            out = torch.empty((rows, W), dtype=BF16, device=self.device)
            page = self.ints([i // PAGE % 256 for i in range(rows)])
            place = self.ints([i % PAGE for i in range(rows)])
            holder = self.ints([i // PAGE % self.size for i in range(rows)])
            found["context"] = (lambda p: p.context_rows(pages, holder, page, place, out), others * W * 2)
        return found

    def merge(self, p: Peers, rows: int, counts: Sequence[int], at: torch.Tensor) -> object:
        out, lse = p.buffer((rows, H, L), BF16), p.buffer((rows, H), torch.float32)
        return p.merge_parts(out, lse, counts, at, counts[self.rank])

    def eager_us(self, peers: Peers, operation: Operation) -> float:
        for _ in range(3):
            operation(peers)
        return self._median_us(lambda: [operation(peers) for _ in range(REPEATS)])

    def graph_us(self, peers: Peers, operation: Operation) -> float:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            peers.begin()
            for _ in range(REPEATS):
                operation(peers)
        for _ in range(3):
            graph.replay()
        return self._median_us(graph.replay)

    def _median_us(self, program: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            self.comm.Barrier()
            begin.record()
            program()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
        return statistics.median(times)

    def line(self, name: str, peers: Peers, rows: int, operation: Operation, num_bytes: int) -> None:
        eager = self.eager_us(peers, operation)
        peers.begin()
        graph = self.graph_us(peers, operation)
        if self.rank == 0:
            rate = num_bytes / graph / 1e3
            print(f"{rows:6d}  {name:22s} {eager:8.1f} {graph:8.2f}  {num_bytes / 1e3:10.0f} {rate:7.0f}", flush=True)

    def alternatives(self, name: str, rows: int, operation: Operation, num_bytes: int) -> None:
        """Times what peers do not choose: pushing in place of reading, or reading in place of pushing; other grids."""
        if name not in ("sum", "sum, spread", "gather"):
            return
        pushed = rows * D * 2 <= PUSH_BYTES
        others = {"read": self.variant(0)} if pushed else {}
        if not pushed and rows * D * 2 <= SLOT_BYTES:
            others["pushed"] = self.variant(SLOT_BYTES)
        if not pushed and name == "sum":
            others |= {f"{blocks} blocks": self.variant(0, blocks) for blocks in (64, 256)}
        for how, peers in others.items():
            peers.begin()
            self.line(f"{name}, {how}", peers, rows, operation, num_bytes)

    def copies(self) -> None:
        """Times copies from a peer's memory to this rank's by the copy engine, on all ranks at once."""
        source = self.mapped[1].addresses[(self.rank + 1) % self.size]
        stream = torch.cuda.Stream()
        for megabytes in (1, 16, ARENA >> 21):
            num_bytes = megabytes << 20
            times = []
            for _ in range(10):
                self.comm.Barrier()
                with torch.cuda.stream(stream):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    copy(self.arena.address + ARENA // 2, source, num_bytes, stream)
                    end.record()
                stream.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            if self.rank == 0:
                print(f"copy of {megabytes} MiB: {num_bytes / statistics.median(times) / 1e9:.0f} GB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 512, 4096, 8192])
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(240, exit=True)
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device = torch.device("cuda", node.Get_rank())
    torch.cuda.set_device(device)
    assert reachable(comm, device), "these GPUs cannot read each other's memory"
    begin = time.monotonic()
    bench = Bench(comm, device)
    bench.check()
    comm.Barrier()
    if bench.rank == 0:
        print(f"{bench.size} x {torch.cuda.get_device_name(device)}: all cases right; {time.monotonic() - begin:.0f} s")
        print(f"{'rows':>6s}  {'operation':22s} {'us':>8s} {'us graph':>8s}  {'KB from others':>10s} {'GB/s':>5s}")
    with torch.inference_mode():
        for rows in [] if arguments.check_only else arguments.rows:
            for name, (operation, num_bytes) in bench.operations(rows).items():
                bench.peers.begin()
                bench.line(name, bench.peers, rows, operation, num_bytes)
                bench.alternatives(name, rows, operation, num_bytes)
        bench.copies()
    comm.Barrier()
    if bench.rank == 0:
        print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
