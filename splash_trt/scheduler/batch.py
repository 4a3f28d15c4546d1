"""One step's work as the cost model sees it: sums for each rank instead of single rows. N ranks.

A request's work is counted at its owner (DP, DOP) or home (CP). In TP requests have neither: only totals count.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec.structs import replace

from splash_trt.config import Layout
from splash_trt.plan import Plan


class Batch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Arrays [N] float64, by owner or home. "Decode" tokens attend absorbed, one or few of a request; "prefill" tokens
    attend expanded."""

    layout: Layout
    decode_tokens: np.ndarray
    decode_context: np.ndarray
    """Cache rows before and with each decode token, summed over tokens."""
    prefill_tokens: np.ndarray
    prefill_pairs: np.ndarray
    """(query, key) pairs of prefill tokens: each token with the rows before it and its own."""
    prefill_context: np.ndarray
    """Cache rows that prefill chunks reach, summed over chunks: what is gathered and up-projected."""
    sampled: int
    """Positions whose next token is wanted."""
    prefill_rows: int = 0
    """Chunks that prefill_tokens come in."""
    decode_longest: int = 0
    """The longest context of a decode token; 0: all have about the same."""
    moved_bytes: int = 0
    """What a switch moves in this step: the most that any rank sends and receives together."""

    @property
    def num_tokens(self) -> float:
        return float(self.decode_tokens.sum() + self.prefill_tokens.sum())

    def under_each(self, layouts: Iterable[Layout]) -> list[Batch]:
        """The same work under each of `layouts`. Owners and homes stay; from TP, which has none, work is dealt out
        evenly."""
        spread = self._dealt(len(self.decode_tokens)) if self.layout is Layout.TP else self
        return [
            self
            if layout is self.layout
            else replace(self._dealt(1) if layout is Layout.TP else spread, layout=layout, moved_bytes=0)
            for layout in layouts
        ]

    def _dealt(self, most: int) -> Batch:
        """The work dealt out evenly over as many ranks as there are decode tokens or prompts, but at most `most`."""

        def over(values: np.ndarray, shares: float) -> np.ndarray:
            if not shares:
                return values
            ranks = min(max(int(shares), 1), most)
            out = np.zeros(len(values))
            out[:ranks] = np.add.reduce(values) / ranks
            return out

        decodes = float(np.add.reduce(self.decode_tokens))
        return replace(
            self,
            decode_tokens=over(self.decode_tokens, decodes),
            decode_context=over(self.decode_context, decodes),
            prefill_tokens=over(self.prefill_tokens, self.prefill_rows),
            prefill_pairs=over(self.prefill_pairs, self.prefill_rows),
            prefill_context=over(self.prefill_context, self.prefill_rows),
        )

    @classmethod
    def of(cls, plan: Plan, num_ranks: int, *, moved_bytes: int = 0) -> Batch:
        """What a plan asks for."""
        count, home = plan.count, plan.home
        end = plan.start + count
        # Token i of a row at `start` meets start + i + 1 rows: summed over the row, count * (start + end + 1) / 2.
        pairs = end if plan.num_tokens == plan.num_rows else count * (plan.start.astype(np.int64) + end + 1) / 2
        prefill: list[np.ndarray] = [np.zeros(num_ranks)] * 3
        prefill_rows = 0
        if not plan.only_decodes:
            expanded = ~plan.absorbed
            there, prefill_rows = home[expanded], int(np.count_nonzero(expanded))
            prefill = [np.bincount(there, x[expanded], num_ranks) for x in (count, pairs, end)]
            count, home, pairs, end = (x[plan.absorbed] for x in (count, home, pairs, end))
        return cls(
            layout=plan.layout,
            decode_tokens=np.bincount(home, count, num_ranks),
            decode_context=np.bincount(home, pairs, num_ranks),
            prefill_tokens=prefill[0],
            prefill_pairs=prefill[1],
            prefill_context=prefill[2],
            prefill_rows=prefill_rows,
            sampled=len(plan.want_index),
            decode_longest=int(np.maximum.reduce(end, initial=0)),
            moved_bytes=moved_bytes,
        )
