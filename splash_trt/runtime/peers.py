"""What ranks exchange inside a step, as operations on rows: sums over ranks with the norm that follows, gathers, DOP's
exchange of queries and results, CP's merge of partial results, and reads of other ranks' cache pages.

T_r rows on this rank, T on all, D hidden, W row width (or wanted rows where a parameter says [W]), H heads, h_r of
rank r, L latent, N ranks. Where rows are spread over ranks, the caller gives both `counts` (on the host: rows of each
rank) and `offsets` [N + 1] int32 (on the device: where each rank's rows begin in the stack of all, the same numbers);
neither where every rank has all rows. Tensors may be longer than the counts say: rows past them are padding, which is
read or written by nobody and undefined in results.

Every rank makes the same calls in the same order. What others are to read must lie in memory that `buffer` gave, and
must be passed to the next call that exchanges data. Sums are taken in float32 or wider and in rank order, so that all
ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from splash_engines.ops import rms_norm
from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.pairs import PairSum
from splash_plugins.lse_merge.reference import lse_merge
from splash_trt.dist.collectives import Collectives

Unsummed = PairSum | PartSum
"""Rows in parts that sum_rows adds up on this rank before it adds up the ranks."""


class Peers(Protocol):
    """Rank `rank` of `size`."""

    rank: int
    size: int

    def begin(self) -> None:
        """All ranks call it at the beginning of a step, and before exchanges after the step's program. Any operation
        may come next, whichever came last: after a replayed graph the host does not know which came last."""
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous memory that the other ranks can read, for the next call that exchanges data; invalid after it."""
        ...

    def takes_unsummed(self, partial: torch.Tensor) -> bool:
        """Whether sum_rows also takes rows like partial [T, D] in parts (Unsummed). The same on all ranks."""
        ...

    def sum_rows(
        self,
        partial: torch.Tensor | Unsummed,
        counts: Sequence[int] | None,
        offsets: torch.Tensor | None,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor | None:
        """Adds the sum over ranks of partial [T, D] to hidden in place: rounded after the sum and again after the
        addition. partial is a buffer, or, where takes_unsummed says so, parts of rows (on some ranks or on all).

        hidden [T_r, D] is this rank's part of the stacked rows, or all rows where counts and offsets are None. Returns
        rms_norm(hidden) * weight [D], in new memory, or None if weight is None.
        """
        ...

    def gather_rows(
        self, x: torch.Tensor, counts: Sequence[int] | None, offsets: torch.Tensor | None, total: int
    ) -> torch.Tensor:
        """x [T_r, ...] (a buffer) of each rank, stacked in rank order, in [total, ...]; without counts all its rows."""
        ...

    def pick_rows(self, x: torch.Tensor, rank: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """[W, D]: row[w] of rank[w]'s x [T_r, D] (a buffer); zeros where rank [W] is -1. The same on all ranks."""
        ...

    def to_owners(self, q: torch.Tensor, owned: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """[B, H, w]: all heads, in rank order, of the tokens that this rank owns, from each rank's q [A, h_r, w].

        q is a buffer, owned [B] int32 this rank's own choice of tokens (-1: padding, whose rows are undefined), heads
        [N] each rank's h_r.
        """
        ...

    def to_heads(
        self, out: torch.Tensor, owner: torch.Tensor, place: torch.Tensor, heads: Sequence[int]
    ) -> torch.Tensor:
        """[A, h_r, L]: this rank's heads of all tokens, from each owner's out [B, H, L] (a buffer).

        Token a is row place[a] of rank owner[a]; both [A] int32 and the same on all ranks. Owner -1 is padding.
        """
        ...

    def merge_parts(
        self, out: torch.Tensor, lse: torch.Tensor, counts: Sequence[int], offsets: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        """[num_rows, H, L]: this rank's rows, attention over the whole context from every rank's part of it.

        out [T, H, L] and lse [T, H] (two buffers): a rank's results for the rows of all ranks, stacked; own row i is
        row offsets[rank] + i.
        """
        ...

    def context_rows(
        self, pages: torch.Tensor, rank: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fills out [C, W] with cache rows: row c is pages[page[c], offset[c]] of rank[c], -1 being padding.

        pages [P, S, W] is this rank's view of one layer of its arena. Every rank asks for what it wants. Rows that any
        rank has stored before this call are there.
        """
        ...

    def gather_small(self, x: torch.Tensor) -> torch.Tensor:
        """[N, W, k]: every rank's x [W, k], any memory and dtype; a few numbers for each row."""
        ...


class CollectivePeers:
    """`Peers` over collectives: what each operation means; for CPUs, and for GPUs that cannot map others' memory."""

    def __init__(self, collectives: Collectives, device: torch.device | str = "cpu") -> None:
        self.rank, self.size = collectives.rank, collectives.size
        self._comm = collectives
        self._device = torch.device(device)

    def begin(self) -> None:
        """Nothing to do: collectives keep ranks in step."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def takes_unsummed(self, partial: torch.Tensor) -> bool:
        return False

    def sum_rows(
        self,
        partial: torch.Tensor | Unsummed,
        counts: Sequence[int] | None,
        offsets: torch.Tensor | None,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor | None:
        assert isinstance(partial, torch.Tensor), "takes_unsummed said no"
        if counts is None:
            hidden += self._comm.all_reduce(partial)
        else:
            hidden[: counts[self.rank]] += self._comm.reduce_scatter(partial[: sum(counts)], counts)
        return None if weight is None else rms_norm(hidden, weight, eps)

    def gather_rows(
        self, x: torch.Tensor, counts: Sequence[int] | None, offsets: torch.Tensor | None, total: int
    ) -> torch.Tensor:
        counts = [len(x)] * self.size if counts is None else counts
        assert sum(counts) <= total, (counts, total)
        out = x.new_zeros((total, *x.shape[1:]))
        out[: sum(counts)] = self._comm.all_gather(x[: counts[self.rank]], counts)
        return out

    def pick_rows(self, x: torch.Tensor, rank: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        at = [torch.nonzero(rank == r)[:, 0] for r in range(self.size)]
        got = self._comm.all_gather(x[row[at[self.rank]].long()], [len(index) for index in at])
        out = x.new_zeros((len(rank), *x.shape[1:]))
        out[torch.cat(at)] = got
        return out

    def to_owners(self, q: torch.Tensor, owned: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        num_tokens, _, width = q.shape
        got = self._comm.all_to_all([q] * self.size, [(num_tokens, h, width) for h in heads])
        out = q.new_zeros((len(owned), sum(heads), width))
        real = owned >= 0
        out[real] = torch.cat(got, dim=1)[owned[real].long()]
        return out

    def to_heads(
        self, out: torch.Tensor, owner: torch.Tensor, place: torch.Tensor, heads: Sequence[int]
    ) -> torch.Tensor:
        at = [torch.nonzero(owner == r)[:, 0] for r in range(self.size)]
        here = out[place[at[self.rank]].long()]
        mine, latent = heads[self.rank], out.shape[2]
        send = [part.contiguous() for part in here.split(list(heads), dim=1)]
        got = self._comm.all_to_all(send, [(len(index), mine, latent) for index in at])
        back = out.new_zeros((len(owner), mine, latent))
        back[torch.cat(at)] = torch.cat(got)
        return back

    def merge_parts(
        self, out: torch.Tensor, lse: torch.Tensor, counts: Sequence[int], offsets: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        mine = counts[self.rank]
        parts = [
            torch.stack(
                self._comm.all_to_all(
                    list(x[: sum(counts)].split(list(counts))), [(mine, *x.shape[1:]) for _ in range(self.size)]
                )
            )
            for x in (out, lse)
        ]
        merged = out.new_zeros((num_rows, *out.shape[1:]))
        merged[:mine] = lse_merge(parts[0], parts[1])[0]
        return merged

    def context_rows(
        self, pages: torch.Tensor, rank: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, out: torch.Tensor
    ) -> None:
        size, me = self.size, self.rank
        at = [torch.nonzero(rank == r)[:, 0] for r in range(size)]
        counts = torch.tensor([len(index) for index in at], device=out.device)
        asked = self._comm.all_gather(counts[None], [1] * size)[:, me].tolist()
        where = torch.stack((page, offset), dim=1)
        requests = self._comm.all_to_all([where[index] for index in at], [(n, 2) for n in asked])
        rows = [pages[r[:, 0].long(), r[:, 1].long()] for r in requests]
        got = self._comm.all_to_all(rows, [(len(index), out.shape[1]) for index in at])
        for index, part in zip(at, got, strict=True):
            out[index] = part

    def gather_small(self, x: torch.Tensor) -> torch.Tensor:
        return self._comm.all_gather(x[None].contiguous(), [1] * self.size)
