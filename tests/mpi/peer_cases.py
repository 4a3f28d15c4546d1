"""What every implementation of Peers must do. Each case runs on all ranks, wherever those live.

Inputs are a function of (seed, rank), so that every rank makes all ranks' inputs and computes the truth itself. Copies
and sums are compared exactly; norms and merges, which hold an exponential or a root, within the dtype's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from splash_trt.memory.arena import DTYPES
from splash_trt.runtime.peers import Peers

EPS = 1e-5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Setting:
    """dtype: of the rows. pages: [P, 2, S, W] of this rank's cache, of which cases use layer 1; None: plain memory."""

    dtype_name: str
    device: torch.device = torch.device("cpu")
    pages: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def random(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype or self.dtype).to(self.device)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def below(self, seed: int, high: int, count: int, low: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(low, high, (count,), generator=generator).tolist()


def filled(peers: Peers, x: torch.Tensor) -> torch.Tensor:
    return peers.buffer(x.shape, x.dtype).copy_(x)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    assert torch.equal(actual, expected), (actual.double() - expected.double()).abs().max()


def count_sets(size: int) -> list[list[int]]:
    """Rows per rank: even, uneven, with zeros, one rank alone, none at all."""
    return [
        [3] * size,
        [rank + 1 for rank in range(size)],
        [(rank * 3) % 4 for rank in range(size)],
        [5 if rank == size - 1 else 0 for rank in range(size)],
        [0] * size,
    ]


def stacked(counts: list[int]) -> list[int]:
    """[N + 1]: where each rank's rows begin."""
    return [sum(counts[:rank]) for rank in range(len(counts) + 1)]


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, 16-bit floats in float32, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = torch.zeros_like(parts[0], dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.double()
    return (y / (y.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()).to(x.dtype)


def sum_of_all_rows(peers: Peers, s: Setting) -> None:
    sizes = [(0, 64), (1, 64), (5, 2048), (9, 96), (80, 1056)]
    if s.device.type == "cuda":
        sizes += [(64, 2048), (65, 2048), (300, 7168), (1000, 2048)]
    for seed, (rows, width) in enumerate(sizes):
        peers.begin()
        parts = [s.random(100 * seed + rank, (rows, width)) for rank in range(peers.size)]
        hidden, weight = s.random(seed, (rows, width)), s.random(seed + 1, (width,))
        expected = hidden + total_of(parts)
        got = peers.sum_rows(filled(peers, parts[peers.rank]), None, None, hidden, weight, EPS)
        same(hidden, expected)
        assert got is not None
        close(got, normed(expected, weight))
        assert peers.sum_rows(filled(peers, parts[peers.rank]), None, None, hidden, None, EPS) is None
        same(hidden, expected + total_of(parts))


def sum_of_spread_rows(peers: Peers, s: Setting) -> None:
    width = 96
    for seed, counts in enumerate(count_sets(peers.size)):
        for pad in (0, 3):
            peers.begin()
            at, mine = stacked(counts), counts[peers.rank]
            parts = [s.random(100 * seed + rank, (sum(counts) + pad, width)) for rank in range(peers.size)]
            hidden, weight = s.random(seed, (mine + pad, width)), s.random(seed + 1, (width,))
            total = total_of(parts)[at[peers.rank] : at[peers.rank + 1]]
            expected = torch.cat((hidden[:mine] + total, hidden[mine:]))
            got = peers.sum_rows(filled(peers, parts[peers.rank]), counts, s.ints(at), hidden, weight, EPS)
            same(hidden, expected)
            assert got is not None and got.shape == hidden.shape
            close(got[:mine], normed(expected[:mine], weight))
            assert peers.sum_rows(filled(peers, parts[peers.rank]), counts, s.ints(at), hidden, None, EPS) is None
            same(hidden[:mine], expected[:mine] + total)


def gather_of_spread_rows(peers: Peers, s: Setting) -> None:
    for seed, counts in enumerate(count_sets(peers.size)):
        for tail in ((7,), (3, 40), (1056,)):
            for pad in (0, 2):
                parts = [s.random(100 * seed + rank, (counts[rank] + pad, *tail)) for rank in range(peers.size)]
                expected = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
                x = filled(peers, parts[peers.rank])
                got = peers.gather_rows(x, counts, s.ints(stacked(counts)), sum(counts) + pad)
                assert got.shape == (sum(counts) + pad, *tail)
                same(got[: sum(counts)], expected)


def gather_of_all_rows(peers: Peers, s: Setting) -> None:
    for rows in (0, 1, 50):
        parts = [s.random(rank, (rows, 24)) for rank in range(peers.size)]
        got = peers.gather_rows(filled(peers, parts[peers.rank]), None, None, rows * peers.size)
        same(got, torch.cat(parts))


def picks(peers: Peers, s: Setting) -> None:
    rows, width = 5, 264
    for wanted in (0, 1, 40):
        rank = s.below(wanted, peers.size, wanted, low=-1)
        row = s.below(wanted + 1, rows, wanted)
        parts = [s.random(r, (rows, width)) for r in range(peers.size)]
        zero = torch.zeros_like(parts[0][0])
        expected = [parts[r][i] if r >= 0 else zero for r, i in zip(rank, row, strict=True)]
        got = peers.pick_rows(filled(peers, parts[peers.rank]), s.ints(rank), s.ints(row))
        same(got, torch.stack(expected) if expected else parts[0][:0])


def heads_of(size: int) -> list[int]:
    """As 7 + 7 + 6: not every number of heads divides by that of ranks."""
    return [4 - (rank == size - 1) for rank in range(size)]


def exchange(peers: Peers, s: Setting) -> None:
    """Queries to owners and outputs back, with padding among the tokens and different numbers per owner."""
    heads, size, me = heads_of(peers.size), peers.size, peers.rank
    for seed, tokens in enumerate((1, 9, 33)):
        owner = s.below(seed, size, tokens, low=-1)
        owned = [[a for a in range(tokens) if owner[a] == rank] for rank in range(size)]
        place = [owned[o].index(a) if o >= 0 else 0 for a, o in enumerate(owner)]
        parts = [s.random(50 * seed + rank, (tokens, heads[rank], 72)) for rank in range(size)]
        slots = tokens + 1
        mine = owned[me] + [-1] * (slots - len(owned[me]))
        got = peers.to_owners(filled(peers, parts[me]), s.ints(mine), heads)
        assert got.shape == (slots, sum(heads), 72)
        same(got[: len(owned[me])], torch.cat(parts, dim=1)[owned[me]])

        outs = [s.random(70 * seed + rank, (slots, sum(heads), 64)) for rank in range(size)]
        back = peers.to_heads(filled(peers, outs[me]), s.ints(owner), s.ints(place), heads)
        first = sum(heads[:me])
        assert back.shape == (tokens, heads[me], 64)
        for a, o in enumerate(owner):
            if o >= 0:
                same(back[a], outs[o][place[a], first : first + heads[me]])


def merges(peers: Peers, s: Setting) -> None:
    size, me, heads, latent = peers.size, peers.rank, 3, 64
    wide = torch.promote_types(s.dtype, torch.float32)
    for seed, counts in enumerate(count_sets(size)):
        total, pad = sum(counts), 2
        outs = [s.random(60 * seed + rank, (total + pad, heads, latent)) for rank in range(size)]
        lses = [4 * s.random(80 * seed + rank, (total + pad, heads), wide) for rank in range(size)]
        for rank in range(1, size):  # parts without anything, which come as 0 and -inf
            lses[rank][rank::2] = -torch.inf
            outs[rank][rank::2] = 0
        lses[0][1::4], outs[0][1::4] = -torch.inf, 0
        weight = torch.stack(lses).double().softmax(dim=0).nan_to_num(0.0)
        expected = (torch.stack(outs).double() * weight[..., None]).sum(dim=0).to(s.dtype)
        at = stacked(counts)
        out, lse = filled(peers, outs[me]), filled(peers, lses[me])
        got = peers.merge_parts(out, lse, counts, s.ints(at), counts[me] + pad)
        assert got.shape == (counts[me] + pad, heads, latent)
        close(got[: counts[me]], expected[at[me] : at[me + 1]])


def context(peers: Peers, s: Setting) -> None:
    num_pages, page_tokens, width = 6, 4, 72
    caches = [s.random(rank, (num_pages, 2, page_tokens, width)) for rank in range(peers.size)]
    pages = torch.empty_like(caches[0]) if s.pages is None else s.pages
    for count in (0, 1, 30 + peers.rank):
        pages.copy_(caches[peers.rank])
        rank = s.below(count, peers.size, count, low=-1)
        page, offset = s.below(count + 1, num_pages, count), s.below(count + 2, page_tokens, count)
        before = s.random(99, (count, width))
        out = before.clone()
        peers.context_rows(pages[:, 1], s.ints(rank), s.ints(page), s.ints(offset), out)
        for c in range(count):
            same(out[c], caches[rank[c]][page[c], 1, offset[c]] if rank[c] >= 0 else before[c])
        peers.gather_small(out.new_zeros((1, 1)))  # nobody changes pages before the others have read them


def small(peers: Peers, s: Setting) -> None:
    for rows in (0, 1, 130):
        parts = [s.random(rank, (rows, 3), torch.float64) for rank in range(peers.size)]
        same(peers.gather_small(parts[peers.rank]), torch.stack(parts))


CASES: tuple[Callable[[Peers, Setting], None], ...] = (
    sum_of_all_rows,
    sum_of_spread_rows,
    gather_of_spread_rows,
    gather_of_all_rows,
    picks,
    exchange,
    merges,
    context,
    small,
)
