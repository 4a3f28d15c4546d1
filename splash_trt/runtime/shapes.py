"""The sizes that steps are padded to, so that one captured graph serves many of them.

All ranks come to the same shape, from the plan alone: a graph holds meetings of the ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Tokens
from splash_trt.plan import Plan

TILE = 128
"""Queries of a tile of expanded attention (PREFILL_TILE of plugins/mla_attention/prefill_kernel.py)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a graph is captured for: sizes after padding."""

    layout: Layout
    rows: int
    """T_r: hidden states of this rank."""
    stacked: int
    """T: tokens of all ranks, one rank after another; T_r where all ranks compute all."""
    absorbed: int
    """A: the first so many rows attend absorbed; those past the real ones read nothing there."""
    reads: int
    """Absorbed queries that this rank attends to: its own (TP, DP), those it owns (DOP), those of all ranks (CP)."""
    wanted: int
    """W."""
    context: int = 0
    """C: rows of the only round of expanded attention; 0: there is none."""
    segments: int = 0
    """S: requests in that round."""

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE) + self.segments if self.context else 0


def ladder(most: int, steps: int) -> list[int]:
    """Ascending sizes up to `most`, `steps` to each doubling: padding costs at most a `steps`-th of what is real."""
    sizes, base = [], 1
    while base < most:
        sizes += sorted({base * (steps + i) // steps for i in range(steps)})
        base *= 2
    return [size for size in sizes if size < most] + [most]


def fit(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` (ascending) that holds `size`."""
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


class Shapes:
    """The shapes of one deployment. decode: sizes of steps that only decode; empty: nothing is padded."""

    def __init__(self, config: EngineConfig, decode: Sequence[int]) -> None:
        self.decode = decode
        self._num_ranks = config.num_ranks
        self._rows = ladder(config.max_batch_tokens, 8)
        self._stacked = ladder(config.max_batch_tokens, 8)
        self._context = ladder(config.context_block_tokens, 4)
        self._wanted = ladder(config.max_batch_tokens, 4)
        self._coarse = ladder(max(config.max_batch_tokens, 8), 1)

    def decoding(self, layout: Layout, size: int) -> Shape:
        """Of steps that only decode, with at most `size` hidden states a rank."""
        stacked = size * self._num_ranks if self._spread(layout) else size
        return Shape(
            layout=layout, rows=size, stacked=stacked, absorbed=size, reads=self._reads(layout, size), wanted=stacked
        )

    def of(self, plan: Plan, ranks: np.ndarray) -> Shape | None:
        """The shape for a plan; None if it is not to be padded. ranks [T]: which rank computes each token."""
        if not self.decode:
            return None
        most = int(plan.counts.max())
        if plan.absorbed.all():
            size = fit(most, self.decode)
            return (
                None
                if size is None or len(plan.want_index) > most * self._num_ranks
                else self.decoding(plan.layout, size)
            )
        return self._mixed(plan, ranks, most)

    def _mixed(self, plan: Plan, ranks: np.ndarray, most: int) -> Shape | None:
        context, segments = self._expanded(plan)
        rows, wide = fit(most, self._rows), fit(context, self._context)
        if rows is None or wide is None:
            return None
        absorbed = plan.absorbed[plan.row_of_token]
        if self._spread(plan.layout):
            num_absorbed = int(np.bincount(ranks[absorbed], minlength=self._num_ranks).max())
            stacked = fit(plan.num_tokens, self._stacked)
        else:
            num_absorbed, stacked = int(absorbed.sum()), rows
        padded = min(fit(max(num_absorbed, 8), self._coarse) or rows, rows) if num_absorbed else 0
        wanted = fit(max(len(plan.want_index), 8), self._wanted)
        assert stacked is not None and wanted is not None
        return Shape(
            layout=plan.layout,
            rows=rows,
            stacked=stacked,
            absorbed=padded,
            reads=self._reads(plan.layout, padded),
            wanted=wanted,
            context=wide,
            segments=fit(segments, self._coarse) or segments,
        )

    def _expanded(self, plan: Plan) -> tuple[int, int]:
        """Context rows of the rank that has most, and requests of the one that has most."""
        rows = np.flatnonzero(~plan.absorbed)
        length = (plan.start + plan.count)[rows]
        if plan.layout is not Layout.DP:
            return int(length.sum()), len(rows)
        home = plan.home[rows]
        per_rank = np.bincount(home, weights=length, minlength=self._num_ranks)
        return int(per_rank.max()), int(np.bincount(home).max())

    def _spread(self, layout: Layout) -> bool:
        return SPECS[layout].tokens is Tokens.SPREAD and self._num_ranks > 1

    def _reads(self, layout: Layout, absorbed: int) -> int:
        return absorbed * (self._num_ranks if layout is Layout.CP else 1)
