"""Sums and gathers of few rows, which ranks push into each other's mailboxes (plugins/peer_rows/push_kernel.py)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.pairs import PairSum
from splash_plugins.overlap_kernel import overlap
from splash_plugins.peer_rows import push_kernel
from splash_trt.runtime.mailbox import SLOT_BYTES, Mailbox
from splash_trt.runtime.peers import Unsummed

_INTEGERS = {2: tl.int16, 4: tl.int32, 8: tl.int64}


class Pushes:
    """Launches the kernels; in each of them the ranks meet. bases [N] int64: where this rank sees each mailbox."""

    def __init__(self, rank: int, bases: torch.Tensor, mailbox: Mailbox, num_blocks: int, limit_bytes: int) -> None:
        assert 0 <= limit_bytes <= SLOT_BYTES, limit_bytes
        self._rank, self._size = rank, len(bases)
        self._bases = bases
        self._mailbox = mailbox
        self._num_blocks = num_blocks
        self._limit = limit_bytes

    def fits(self, x: torch.Tensor, rows: int) -> bool:
        """Whether `rows` rows like x's are few enough to push. rows must be the same on all ranks, so that the answer
        is."""
        num_bytes = rows * math.prod(x.shape[1:]) * x.itemsize
        return self._size > 1 and x.is_floating_point() and 0 < num_bytes <= self._limit

    def sum_rows(
        self,
        partial: torch.Tensor | Unsummed,
        offsets: torch.Tensor | None,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        out: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Peers.sum_rows, with `out` for its result."""
        rows, width = partial.shape
        columns = triton.next_power_of_2(width)
        joined = isinstance(partial, PairSum) and partial.joined
        sums, top_k = _sums(partial)
        rest = (hidden, hidden if weight is None else weight, hidden if out is None else out)
        common = {
            "SIZE": self._size,
            "SLOT_BYTES": SLOT_BYTES,
            "INTEGER": _INTEGERS[hidden.itemsize],
            "SIGN": push_kernel.SIGN[hidden.itemsize],
            "NORM": weight is not None,
            "TOP_K": top_k,
            "COLUMNS": columns,
            "num_warps": _warps(columns * hidden.itemsize),
            **overlap(hidden, after_join=joined),
        }
        grid, start = (min(rows, self._num_blocks),), self._mailbox.slots
        if offsets is None:
            push_kernel.push_sum_rows_kernel[grid](
                self._bases, start, *sums, *rest, rows, width, eps, self._rank, **common
            )
        else:
            push_kernel.push_sum_spread_kernel[grid](
                self._bases,
                start,
                self._mailbox.tokens,
                *sums,
                *rest,
                offsets,
                width,
                eps,
                self._rank,
                **common,
            )

    def gather_rows(self, x: torch.Tensor, offsets: torch.Tensor | None, out: torch.Tensor) -> None:
        """Peers.gather_rows, with `out` for its result."""
        width = math.prod(x.shape[1:])
        block = min(triton.next_power_of_2(width), 4096 // x.itemsize)
        push_kernel.push_gather_kernel[(min(len(out) * -(-width // block), self._num_blocks),)](
            self._bases,
            self._mailbox.slots,
            self._mailbox.tokens,
            x,
            self._bases if offsets is None else offsets,
            out,
            len(x),
            width,
            self._rank,
            SIZE=self._size,
            INTEGER=_INTEGERS[x.itemsize],
            SIGN=push_kernel.SIGN[x.itemsize],
            SPREAD=offsets is not None,
            BLOCK=block,
            num_warps=_warps(block * x.itemsize),
            **overlap(x),
        )


def _sums(partial: torch.Tensor | Unsummed) -> tuple[tuple[torch.Tensor | int | None, ...], int]:
    """The sum kernels' arguments from `partial` to `num_experts`, and TOP_K."""
    if isinstance(partial, torch.Tensor):
        return (partial, None, None, None, None, 0, 0, 0), 0
    if isinstance(partial, PartSum):
        return (None, partial.y, None, None, None, 0, 0, 0), partial.y.shape[1]
    addend = partial.addend
    stride = 0 if addend is None else addend.stride(0)
    experts = (addend, stride, partial.first_expert, partial.num_experts)
    return (None, partial.y, partial.choice, partial.weight, *experts), partial.choice.shape[1]


def _warps(num_bytes: int) -> int:
    """16 bytes a thread, so that no two threads look at the same number."""
    return max(1, min(16, num_bytes // 512))
