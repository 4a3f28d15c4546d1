"""The sizes that steps are padded to, so that one captured graph serves many steps.

The shape follows from the plan alone, so it is the same on all ranks: a graph contains exchanges between the ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splash_plugins.mla_attention.tiles import PREFILL_TILE
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Tokens
from splash_trt.plan import Plan

_LEAST_ROWS = 256  # the smallest size of steps that also prefill: fewer rows take as long
_FEW_ABSORBED = 64
_SMALL_ROWS, _SEGMENTS = 2048, 64  # up to so many rows, a shape has room for so many requests in its round
_APART = 512  # rows between two sizes above _SMALL_ROWS


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
    """Absorbed queries for which this rank attends: its own (TP, DP), of requests it owns (DOP), of all ranks (CP)."""
    wanted: int
    """W."""
    context: int = 0
    """C: context rows of the one round of expanded attention; 0: the step has none."""
    segments: int = 0
    """S: requests in that round."""

    @property
    def tiles(self) -> int:
        return -(-self.rows // PREFILL_TILE) + self.segments if self.context else 0


def ladder(least: int, most: int, steps: int) -> list[int]:
    """Ascending sizes from `least` to `most`, `steps` to each doubling of it."""
    sizes, base = [], least
    while base < most:
        sizes += sorted({base * (steps + i) // steps for i in range(steps)})
        base *= 2
    return [size for size in sizes if size < most] + [most]


def fit(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` (ascending) that holds `size`."""
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


class Shapes:
    """The shapes of one deployment.

    Numbers of rows are a quarter of a doubling apart, or 512. Steps that also prefill have many sizes that combine, so
    what costs little as padding (absorbed rows, requests, wanted positions) has only one or two sizes.
    """

    def __init__(self, config: EngineConfig, decode: Sequence[int]) -> None:
        """decode: ascending sizes of steps that only decode; empty: nothing is padded."""
        self._num_ranks = config.num_ranks
        self._most = config.max_batch_tokens
        self._block = config.context_block
        self._decode = decode
        small = ladder(min(_LEAST_ROWS, self._most), min(_SMALL_ROWS, self._most), 4)
        self._rows = [*small[:-1], *range(small[-1], self._most, _APART), self._most]
        self._absorbed = sorted({min(_FEW_ABSORBED, decode[-1]), decode[-1]}) if decode else []

    @property
    def most_wanted(self) -> int:
        """W of the largest shape; 0: nothing is padded."""
        largest = self._decode[-1] if self._decode else 0
        return largest * self._num_ranks + 4 * _SEGMENTS if largest else 0

    def before(self, layout: Layout) -> list[Shape]:
        """The shapes to capture in advance, the largest first: steps that only decode, of every size; steps that also
        prefill whole prompts (spread evenly over the ranks where tokens are spread, and under DP also a single prompt);
        and large steps in which the first or only prompt began in an earlier step."""
        shapes: list[Shape | None] = [self._decoding(layout, size) for size in self._decode]
        ranks = self._num_ranks if self._spread(layout) else 1
        full = -(-self._most // ranks)
        for rows in self._rows if self._decode else ():
            sizes = self._absorbed_sizes(rows)
            contexts = [0] + [self._block] * (2 * rows >= self._most)
            if layout is Layout.DP:
                shapes += [self._mixed(layout, rows, rows, sizes[0], context) for context in contexts]
            contexts += [rows + 1] * (rows >= full)
            if 2 * rows <= 3 * full:
                total = min(ranks * rows, self._most)
                shapes += [self._mixed(layout, rows, total, size, context) for size in sizes for context in contexts]
        found = dict.fromkeys(shape for shape in shapes if shape is not None)
        return sorted(found, key=lambda shape: -shape.stacked)

    def of(self, plan: Plan, ranks: np.ndarray) -> Shape | None:
        """The shape for a plan; None if the plan is not padded. ranks [T]: which rank computes each token."""
        if not self._decode:
            return None
        assert plan.num_tokens <= self._most, (plan.num_tokens, self._most)
        most = int(plan.counts.max())
        if plan.absorbed.all():
            size = fit(most, self._decode)
            return None if size is None else self._decoding(plan.layout, size)
        absorbed = plan.absorbed[plan.row_of_token]
        spread = self._spread(plan.layout)
        here = int(np.bincount(ranks[absorbed], minlength=1).max()) if spread else int(absorbed.sum())
        rows = fit(most, self._rows)
        if rows is None:
            return None
        some = fit(here, self._absorbed_sizes(rows))
        context, requests = self._expanded(plan)
        if some is None:
            return None
        shape = self._mixed(plan.layout, rows, plan.num_tokens, some, context)
        fits = shape is not None and requests <= shape.segments and len(plan.want_index) <= shape.wanted
        return shape if fits else None

    def _absorbed_sizes(self, rows: int) -> list[int]:
        """Sizes of the absorbed part of steps that also prefill. Steps of many rows take so long that one size will
        do."""
        return self._absorbed if rows <= _SMALL_ROWS else self._absorbed[-1:]

    def _decoding(self, layout: Layout, size: int) -> Shape:
        """The shape of steps that only decode, with at most `size` hidden states a rank."""
        stacked = size * self._num_ranks if self._spread(layout) else size
        return Shape(
            layout=layout, rows=size, stacked=stacked, absorbed=size, reads=self._reads(layout, size), wanted=stacked
        )

    def _mixed(self, layout: Layout, rows: int, num_tokens: int, absorbed: int, context: int) -> Shape | None:
        """Shape of steps that also prefill: `rows` hidden states a rank, num_tokens in all, up to `absorbed` of them
        absorbed on a rank, `context` context rows on the rank that has most. None if these do not fit into a round."""
        spread = self._spread(layout)
        stacked = rows
        while spread and stacked < num_tokens:
            stacked = min(2 * stacked, self._most)
        # Three sizes: for whole prompts; a quarter more, for when one of many began in the step before; a full round.
        whole = min(stacked if layout is Layout.CP else rows, self._block)
        room = fit(context, sorted({whole, min(whole + whole // 4, self._block), self._block}))
        if room is None:
            return None
        absorbed = min(absorbed, rows)
        segments = _SEGMENTS if rows <= _SMALL_ROWS else 4 * _SEGMENTS
        return Shape(
            layout=layout,
            rows=rows,
            stacked=stacked,
            absorbed=absorbed,
            reads=self._reads(layout, absorbed),
            wanted=absorbed * (self._num_ranks if spread else 1) + segments,
            context=room,
            segments=segments,
        )

    def _expanded(self, plan: Plan) -> tuple[int, int]:
        """(Context rows of the rank that has most, requests with expanded tokens of the rank that has most.)"""
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
