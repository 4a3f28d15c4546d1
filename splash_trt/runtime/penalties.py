"""Presence, frequency and repetition penalties over a shard of the vocabulary.

P rows of counts, one for each slot that has a penalty; V ids of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_FIRST_ROWS = 8


@dataclass(frozen=True, eq=False)
class Share:
    """The ids of a rank: first_id … first_id + width - 1."""

    first_id: int
    width: int

    def columns(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of those of `ids` [n] that lie in the share, and their columns."""
        column = ids.astype(np.int64) - self.first_id
        here = np.flatnonzero((column >= 0) & (column < self.width))
        return here, column[here]


class Penalties:
    """Counts of what each penalised slot has seen; memory is for as many as there have been at once."""

    def __init__(self, share: Share, max_slots: int) -> None:
        self._share = share
        self._row = np.full(max_slots, -1, np.int64)
        """[slots]: the slot's row, -1 if it has none."""
        self._free: list[int] = []
        self._output = torch.zeros(0, share.width, dtype=torch.int32)
        """[P, V]: times that the id is in the output."""
        self._seen = torch.zeros(0, share.width, dtype=torch.bool)
        """[P, V]: the id is in the output, or in the prompt of a slot with a repetition penalty."""
        self._amounts = np.zeros((max_slots, 3))
        """[slots, 3]: repetition, frequency, presence."""

    def open(self, slot: int, amounts: tuple[float, float, float], prompt: np.ndarray, output: np.ndarray) -> None:
        """amounts: repetition, frequency, presence. prompt, output: ids so far, [n] each."""
        if not self._free:
            self._grow()
        row = self._row[slot] = self._free.pop()
        self._amounts[slot] = amounts
        counts = torch.from_numpy(self._counts(output))
        self._output[row] = counts
        self._seen[row] = (counts > 0) | torch.from_numpy(self._counts(prompt) > 0)

    def close(self, slot: int) -> None:
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1

    def count(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """tokens [n]: ids that these slots [n] have just been given."""
        here, column = self._share.columns(tokens)
        row = self._row[slots[here]]
        mine = row >= 0
        index = torch.from_numpy(row[mine]), torch.from_numpy(column[mine])
        self._output.index_put_(index, torch.ones(len(index[0]), dtype=torch.int32), accumulate=True)
        self._seen[index] = True

    def apply(self, x: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        """Penalise those of the rows [R] of x [W, V] whose slots [R] have a penalty, in place.

        Only ids that were seen are touched: all of [R, V] would cost half of what drawing the tokens does.
        repetition: transformers' RepetitionPenaltyLogitsProcessor; frequency, presence: OpenAI's API reference.
        """
        mine = self._row[slots] >= 0
        if not mine.any():
            return
        slots = slots[mine]
        counted = torch.from_numpy(self._row[slots])
        which, column = self._seen[counted].nonzero(as_tuple=True)
        where = torch.from_numpy(rows[mine])[which], column
        values, times = x[where], self._output[counted[which], column]
        repetition, frequency, presence = torch.from_numpy(self._amounts[slots]).to(x.dtype)[which].unbind(1)
        values = torch.where(values > 0, values / repetition, values * repetition)
        x[where] = values.sub_(frequency * times).sub_(presence * (times > 0))

    def _counts(self, ids: np.ndarray) -> np.ndarray:
        """[V] int32."""
        _, column = self._share.columns(ids)
        return np.bincount(column, minlength=self._share.width).astype(np.int32)

    def _grow(self) -> None:
        before = len(self._output)
        more = max(_FIRST_ROWS, before)
        self._output = torch.cat([self._output, self._output.new_zeros(more, self._share.width)])
        self._seen = torch.cat([self._seen, self._seen.new_zeros(more, self._share.width)])
        self._free = list(range(before + more - 1, before - 1, -1))
