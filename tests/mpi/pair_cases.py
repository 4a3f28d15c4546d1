"""Peers that sum a token's experts or a product's parts on the way give the bits that they give of rows which were
summed before.

Import it where kernels can be launched, or are interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.kernel import combine
from splash_plugins.grouped_experts.pairs import PairSum
from splash_trt.runtime.peers import Peers, Unsummed
from tests.mpi.peer_cases import EPS, Setting, count_sets, same, stacked

LOCAL, TOP_K, PARTS = 3, 4, 5


@dataclass(frozen=True)
class Sum:
    """counts: rows of each rank, None: all have all of them. pad: rows beyond those."""

    width: int
    counts: list[int] | None
    rows: int
    pad: int = 0

    @property
    def stacked(self) -> int:
        return self.rows + self.pad


def sums_of_pairs(peers: Peers, s: Setting) -> int:
    """How many were compared: none where the peers sum no pairs."""
    compared = 0
    for seed, what in enumerate(_sums(peers.size, s)):
        like = torch.empty((what.stacked, what.width), dtype=s.dtype, device=s.device)
        if not peers.takes_unsummed(like):
            continue
        for addend, norm, mixed in ((True, True, False), (False, False, False), (False, True, True)):
            _compare(peers, s, what, seed, _pairs(peers, s, what, seed, addend), norm, mixed)
            compared += 1
        y = s.random(seed + 1000 * peers.rank, (what.stacked * PARTS, what.width), torch.float32)
        _compare(peers, s, what, seed, PartSum(y.view(what.stacked, PARTS, what.width)), True, seed % 2 == 1)
        compared += 1
    return compared


def _sums(size: int, s: Setting) -> list[Sum]:
    sums = [Sum(width, None, rows) for rows, width in ((1, 64), (5, 96), (9, 2048))]
    sums += [Sum(96, counts, sum(counts), pad) for counts in count_sets(size) for pad in (0, 3)]
    if s.device.type == "cuda":
        sums += [Sum(2048, None, 16), Sum(2048, None, 64 * 2 // s.dtype.itemsize), Sum(7168, None, 8)]
        sums += [
            Sum(2048, [16 // size] * size, 16),
            Sum(2048, [rank + 1 for rank in range(size)], size * (size + 1) // 2),
        ]
    return sums


def _compare(peers: Peers, s: Setting, what: Sum, seed: int, left: Unsummed, norm: bool, mixed: bool) -> None:
    """mixed: rank 0 has its rows summed before."""
    peers.begin()
    me, offsets = peers.rank, None
    begin, end = 0, what.stacked
    if what.counts is not None:
        at = stacked(what.counts)
        begin, end, offsets = at[me], at[me] + what.counts[me], s.ints(at)
    before = s.random(seed, (end - begin + what.pad, what.width))
    weight = s.random(seed + 1, (what.width,)) if norm else None
    summed = peers.buffer(left.shape, s.dtype)
    _combine(left, summed)
    assert not summed.isnan().any()
    want, hidden = before.clone(), before.clone()
    normed = peers.sum_rows(summed, what.counts, offsets, want, weight, EPS)
    given: torch.Tensor | Unsummed = left
    if mixed and me == 0:
        given = peers.buffer(left.shape, s.dtype)
        _combine(left, given)
    got = peers.sum_rows(given, what.counts, offsets, hidden, weight, EPS)
    same(hidden, want)
    assert end == begin or not torch.equal(want, before)
    assert (got is None) == (normed is None)
    if got is not None and normed is not None:
        same(got[: end - begin], normed[: end - begin])


def _combine(left: Unsummed, out: torch.Tensor) -> None:
    if isinstance(left, PartSum):
        out.copy_(sum(left.y.unbind(1), torch.zeros_like(left.y[:, 0])).to(out.dtype))
        return
    combine(left.y, left.choice, left.weight, left.first_expert, left.num_experts, left.addend, out)


def _pairs(peers: Peers, s: Setting, what: Sum, seed: int, addend: bool) -> PairSum:
    """Of this rank, whose are LOCAL experts: row 1 has none here but on rank 0, row 2 (a padding one) has none at all,
    and what other ranks would compute is NaN."""
    rows, first = what.stacked, LOCAL * peers.rank
    choice = s.ints(s.below(seed, LOCAL * peers.size, rows * TOP_K)).view(rows, TOP_K)
    choice[1:2] %= LOCAL
    choice[2:3] = -1
    here = (choice >= first) & (choice < first + LOCAL)
    y = s.random(1000 * seed + peers.rank, (rows * TOP_K, what.width))
    y[~here.flatten()] = torch.nan
    weight = s.random(seed + 2, (rows, TOP_K), torch.float32)
    # Its rows lie apart, and the last of them holds what nobody is to read.
    wide = s.random(2000 * seed + peers.rank, (rows, what.width + 16))
    wide[:, what.width :] = torch.nan
    return PairSum(y, choice, weight, first, LOCAL, wide[:, : what.width] if addend else None, joined=addend)
