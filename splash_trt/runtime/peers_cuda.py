"""`Peers` over memory that is mapped into every rank of a host. Each operation is one kernel, which meets the other
ranks' kernels and then reads their data straight from their memory, without NCCL or NVLink multicast.

To meet means to wait until all ranks' kernels have come to the same point (plugins/peer_rows/kernel.py says how). Each
rank has a mailbox (mailbox.py) with flags for meeting, slots to which few rows are pushed instead of being read
(push_kernel.py says why and how), and two halves for buffers.

`buffer` gives memory of the current half, one piece after another. Every operation meets the others once, reads the
current half of all mailboxes, and then makes the other half the current one. Two halves and one meeting an operation
are enough: operations k and k + 2 use the same half. A rank writes to it for k + 2 only after its own k + 1 is done, in
which it met all ranks. Each of them came to that meeting after its own k was done (kernels of a stream run one after
another), and so had read this half. No operation writes what it also reads, except `sum_rows` for large messages of
more than two ranks: there each rank sums a slice in place, which nobody else reads in that kernel, and a second kernel
with a meeting of its own gathers the slices.

`begin` makes half 0 the current one. As a step may have ended in either half, `begin` has a meeting too: after it all
ranks have done all operations of the step before, and both halves are free. So a captured step, which begins with it,
can follow any other step, captured or not. Operations that follow a replayed graph begin with it as well, since a
replay does not change the current half on the host.

If a rank hangs, the others' kernels wait on their devices for ever, and their hosts wait for the end of the step. The
watchdog (dist/watchdog.py) bounds that wait: it ends the processes, and with them the kernels.

Kernels are compiled at their first launch, while the others wait. Grids depend only on what all ranks have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from splash_plugins.overlap_kernel import overlap
from splash_plugins.peer_rows import kernel
from splash_trt.dist.handles import on_one_host, share
from splash_trt.dist.rank_sum import even_split
from splash_trt.memory.device_memory import DeviceMemory
from splash_trt.runtime.mailbox import Mailbox, Mapped, mailbox_bytes
from splash_trt.runtime.peers import Unsummed
from splash_trt.runtime.pushes import Pushes

if TYPE_CHECKING:
    from mpi4py import MPI

PUSH_BYTES = 256 << 10
"""Messages up to this size are pushed (push_kernel.py): their own time, at most 0.7 us over NVLink, is less than the
latency that pushing saves."""
TWO_SHOT_BYTES = 256 << 10
"""From this size on, more than two ranks sum in slices. Half a megabyte takes 1.2 us over NVLink, about as long as the
additional meeting."""


def reachable(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Whether the ranks of comm, each with its `device`, can use CudaPeers. Collective; the same answer on all."""
    if not on_one_host(comm):
        return False
    devices = np.zeros(comm.Get_size(), np.int64)
    comm.Allgather(np.array([device.index], np.int64), devices)
    # Ranks that share a GPU can meet too: the GPU gives its processes turns, also while their kernels wait.
    others = [int(index) for index in devices if index != device.index]
    mine = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    answers = np.zeros(comm.Get_size(), np.bool_)
    comm.Allgather(np.array([mine], np.bool_), answers)
    return bool(answers.all()) and comm.Get_size() <= kernel.MAX_RANKS


def connect(
    comm: MPI.Intracomm,
    device: torch.device,
    half: int,
    arena: DeviceMemory,
    pages_offsets: Sequence[int],
    deadline_s: float,
) -> tuple[CudaPeers, DeviceMemory]:
    """Maps a new mailbox and the arena of each rank into all. Collective; returns the peers and this rank's mailbox.

    ValueError if a GPU has no room for it; RankFailure if a rank does not come in time.
    """
    memory = DeviceMemory(mailbox_bytes(half), device)
    mailbox, pages = (Mapped(m.bytes, share(m, comm, deadline_s)) for m in (memory, arena))
    return CudaPeers(comm.Get_rank(), mailbox, half, pages, pages_offsets), memory


class CudaPeers:
    """`Peers` on one host. All ranks construct it with the same sizes; kernels run on the current stream, which must
    always be the same one.

    mailbox: at least mailbox_bytes(half), zeroed before any rank uses it. arena: the memory with the cache pages, which
    begin `pages_offsets` [N] bytes into each rank's. num_blocks: the most blocks of a grid. push_bytes: sums and
    gathers push rows of up to this size all together (at most mailbox.SLOT_BYTES).
    """

    def __init__(
        self,
        rank: int,
        mailbox: Mapped,
        half: int,
        arena: Mapped | None = None,
        pages_offsets: Sequence[int] = (),
        num_blocks: int = 128,
        push_bytes: int = PUSH_BYTES,
    ) -> None:
        self.rank, self.size = rank, len(mailbox.addresses)
        assert self.size <= kernel.MAX_RANKS and 0 < num_blocks <= kernel.MAX_BLOCKS, (self.size, num_blocks)
        self._mailbox = Mailbox(mailbox.bytes, half)
        self._num_blocks = num_blocks
        device = mailbox.bytes.device
        self._bases = torch.tensor(list(mailbox.addresses), dtype=torch.int64, device=device)
        self._pushes = Pushes(rank, self._bases, self._mailbox, num_blocks, push_bytes)
        self._arena = arena
        if arena is not None:
            pages = [address + at for address, at in zip(arena.addresses, pages_offsets, strict=True)]
            self._pages = torch.tensor(pages, dtype=torch.int64, device=device)
            self._own_pages = pages[rank]
        self._meeting = {
            "SIZE": self.size,
            "BLOCKS": kernel.MAX_BLOCKS,
            "RANKS": kernel.MAX_RANKS,
        }
        self._common = {**self._meeting, "MEET": self.size > 1, **overlap(self._bases)}

    @property
    def arena_addresses(self) -> tuple[int, ...]:
        """[N]: where this rank sees each rank's arena."""
        assert self._arena is not None
        return tuple(self._arena.addresses)

    def begin(self) -> None:
        self._mailbox.reset()
        if self.size > 1:
            kernel.meet_kernel[(1,)](self._bases, self.rank, **self._meeting, num_warps=1)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._mailbox.buffer(shape, dtype)

    def takes_unsummed(self, partial: torch.Tensor) -> bool:
        # The kernels that push rows can also add up a token's experts or a product's parts, in float32, which saves a
        # launch.
        return partial.itemsize <= 4 and self._pushes.fits(partial, len(partial))

    def sum_rows(
        self,
        partial: torch.Tensor | Unsummed,
        counts: Sequence[int] | None,
        offsets: torch.Tensor | None,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor | None:
        rows, width = partial.shape
        out = None if weight is None else torch.empty_like(hidden)
        if self._pushes.fits(hidden, rows):
            self._pushes.sum_rows(partial, offsets, hidden, weight, out, eps)
            self._mailbox.turn()
            return out
        assert isinstance(partial, torch.Tensor), "takes_unsummed said no"
        start = self._mailbox.place(partial)
        sliced = offsets is None and self.size > 2 and partial.nbytes >= TWO_SHOT_BYTES
        if sliced:
            block = 4096 // partial.itemsize * 2
            grid = self._grid(rows * width, block * self.size)
            kernel.sum_slice_kernel[grid](
                self._bases, start, partial, rows, width, self.rank, **self._common, BLOCK=block, num_warps=8
            )
        tile = _row_tile(rows, width, self._num_blocks)
        kernel.sum_rows_kernel[self._grid(rows, tile["ROWS"])](
            self._bases,
            start,
            hidden,
            hidden if weight is None else weight,
            hidden if out is None else out,
            self._bases if offsets is None else offsets,
            len(hidden),
            width,
            eps,
            self.rank,
            **self._common,
            SPREAD=offsets is not None,
            SUMMED=sliced,
            NORM=weight is not None,
            **tile,
        )
        self._mailbox.turn()
        return out

    def gather_rows(
        self, x: torch.Tensor, counts: Sequence[int] | None, offsets: torch.Tensor | None, total: int
    ) -> torch.Tensor:
        out = x.new_empty((total, *x.shape[1:]))
        if self._pushes.fits(x, total):
            self._pushes.gather_rows(x, offsets, out)
            self._mailbox.turn()
            return out
        width = math.prod(x.shape[1:])
        block = _block(width, x.itemsize)
        kernel.gather_rows_kernel[self._grid(total * -(-width // block), 1)](
            self._bases,
            self._mailbox.place(x),
            self._bases if offsets is None else offsets,
            out,
            len(x),
            total,
            width,
            self.rank,
            **self._common,
            SPREAD=offsets is not None,
            BLOCK=block,
            num_warps=8,
        )
        self._mailbox.turn()
        return out

    def pick_rows(self, x: torch.Tensor, rank: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        width = math.prod(x.shape[1:])
        out = x.new_empty((len(rank), *x.shape[1:]))
        self._pick(self._bases, self._mailbox.place(x), rank, row, out, width, stride=width, fill=True)
        return out

    def to_owners(self, q: torch.Tensor, owned: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        tokens, _, width = q.shape
        assert list(heads) == even_split(sum(heads), self.size), heads
        out = q.new_empty((len(owned), sum(heads), width))
        kernel.to_owners_kernel[self._grid(tokens * self.size, 1)](
            self._bases,
            self._mailbox.place(q),
            owned,
            out,
            len(owned),
            sum(heads),
            width,
            self.rank,
            **self._common,
            BLOCK=_block(max(heads) * width, q.itemsize),
            num_warps=8,
        )
        self._mailbox.turn()
        return out

    def to_heads(
        self, out: torch.Tensor, owner: torch.Tensor, place: torch.Tensor, heads: Sequence[int]
    ) -> torch.Tensor:
        latent, mine = out.shape[2], heads[self.rank]
        start = self._mailbox.place(out) + sum(heads[: self.rank]) * latent * out.itemsize
        back = out.new_empty((len(owner), mine, latent))
        stride, widest = sum(heads) * latent, max(heads) * latent
        self._pick(self._bases, start, owner, place, back, mine * latent, stride=stride, widest=widest)
        return back

    def merge_parts(
        self, out: torch.Tensor, lse: torch.Tensor, counts: Sequence[int], offsets: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        rows, heads, width = out.shape
        columns = triton.next_power_of_2(width)
        tile = max(1, 4096 // columns)
        merged = out.new_empty((num_rows, heads, width))
        kernel.merge_parts_kernel[self._grid(rows * heads, tile * self.size)](
            self._bases,
            self._mailbox.place(out),
            self._mailbox.place(lse),
            lse,
            offsets,
            merged,
            num_rows,
            heads,
            width,
            self.rank,
            **self._common,
            ROWS=tile,
            COLUMNS=columns,
            num_warps=8,
        )
        self._mailbox.turn()
        return merged

    def context_rows(
        self, pages: torch.Tensor, rank: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert self._arena is not None and pages.stride(2) == 1 and out.is_contiguous()
        start = pages.data_ptr() - self._own_pages
        self._pick(
            self._pages,
            start,
            rank,
            page,
            out,
            out.shape[1],
            stride=pages.stride(0),
            sub_index=offset,
            sub_stride=pages.stride(1),
            blocks=self._num_blocks,
        )

    def gather_small(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.size, *x.shape))
        start = self._mailbox.place(self.buffer(x.shape, x.dtype))
        kernel.gather_small_kernel[self._grid(x.numel(), 256)](
            self._bases,
            start,
            x.contiguous(),
            out,
            x.numel(),
            self.rank,
            **self._common,
            BLOCK=256,
            num_warps=4,
        )
        self._mailbox.turn()
        return out

    def _pick(
        self,
        sources: torch.Tensor,
        start: int,
        rank: torch.Tensor,
        index: torch.Tensor,
        out: torch.Tensor,
        width: int,
        stride: int,
        sub_index: torch.Tensor | None = None,
        sub_stride: int = 0,
        fill: bool = False,
        blocks: int | None = None,
        widest: int | None = None,
    ) -> None:
        """All ranks must have the same grid. widest: the largest width, where ranks' widths differ. blocks: the grid,
        where ranks differ in len(index)."""
        widest = width if widest is None else widest
        block = _block(widest, out.itemsize)
        grid = self._grid(len(index) * -(-widest // block), 1) if blocks is None else (blocks,)
        kernel.pick_rows_kernel[grid](
            self._bases,
            sources,
            start,
            rank,
            index,
            index if sub_index is None else sub_index,
            out,
            len(index),
            width,
            stride,
            sub_stride,
            self.rank,
            **self._common,
            SUB=sub_index is not None,
            FILL=fill,
            ALIGN=16 if start % 16 == 0 else out.itemsize,
            BLOCK=block,
            num_warps=8 if block * out.itemsize >= 8192 else 4,
        )
        self._mailbox.turn()

    def _grid(self, length: int, per_block: int) -> tuple[int]:
        return (max(1, min(self._num_blocks, -(-length // per_block))),)


def _block(width: int, itemsize: int) -> int:
    """Numbers that a program copies at a time: up to 16 KiB, for 8 warps four pieces of 16 bytes a thread."""
    return min(triton.next_power_of_2(width), 16384 // itemsize)


def _row_tile(rows: int, width: int, num_blocks: int) -> dict[str, int]:
    """One row a program as long as there are blocks enough, else up to four."""
    columns = triton.next_power_of_2(width)
    tile = 1
    while tile < 4 and tile * num_blocks < rows and 2 * tile * columns <= 8192:
        tile *= 2
    return {"ROWS": tile, "COLUMNS": columns, "num_warps": max(4, min(16, tile * columns // 512 if tile == 1 else 8))}
