"""Presence, frequency and repetition penalties over a shard of the vocabulary.

P rows of counts, one for each slot that has a penalty; V ids of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splash_trt.runtime.sampler import column_blocks
from splash_trt.runtime.to_device import to_device

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
    """Counts of what each penalised slot has seen; memory is for as many as there have been at once.

    They live where the logits are, so that a step's tokens need not come to the host.
    """

    def __init__(self, share: Share, max_slots: int, device: torch.device | str = "cpu") -> None:
        self._share = share
        self._device = torch.device(device)
        self._row = np.full(max_slots, -1, np.int64)
        """[slots]: the slot's row, -1 if it has none."""
        self._free: list[int] = []
        self._output = torch.zeros(0, share.width, dtype=torch.int32, device=self._device)
        """[P, V]: times that the id is in the output."""
        self._seen = torch.zeros(0, share.width, dtype=torch.bool, device=self._device)
        """[P, V]: the id is in the output, or in the prompt of a slot with a repetition penalty."""
        self._amounts = np.zeros((max_slots, 3))
        """[slots, 3]: repetition, frequency, presence."""

    def open(self, slot: int, amounts: tuple[float, float, float], prompt: np.ndarray, output: np.ndarray) -> None:
        """amounts: repetition, frequency, presence. prompt, output: ids so far, [n] each."""
        if not self._free:
            self._grow()
        row = self._row[slot] = self._free.pop()
        self._amounts[slot] = amounts
        counts = self._counts(output)
        self._output[row] = to_device(counts, self._device)
        self._seen[row] = to_device((counts > 0) | (self._counts(prompt) > 0), self._device)

    def close(self, slot: int) -> None:
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1

    def count(self, slots: np.ndarray, tokens: Tensor) -> None:
        """tokens [n] int64, on the device: ids that these slots [n], each another, have just been given."""
        mine = np.flatnonzero(self._row[slots] >= 0)
        if not len(mine) or not self._share.width:
            return
        which, row = to_device(np.stack([mine, self._row[slots[mine]]]), self._device).unbind()
        column = tokens[which] - self._share.first_id
        here = (column >= 0) & (column < self._share.width)
        at = row, column.clamp(0, self._share.width - 1)  # to leave out the others, the host would have to wait
        self._output[at] += here.int()
        self._seen[at] |= here

    def apply(self, x: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        """Penalise those of the rows [R] of x [W, V] whose slots [R] have a penalty, in place.

        repetition: transformers' RepetitionPenaltyLogitsProcessor; frequency, presence: OpenAI's API reference.
        """
        mine = self._row[slots] >= 0
        if not mine.any():
            return
        row, counted = to_device(np.stack([rows[mine], self._row[slots[mine]]]), self._device).unbind()
        amounts = to_device(self._amounts[slots[mine]], self._device).to(x.dtype)
        repetition, frequency, presence = amounts[:, :, None].unbind(1)
        for block in column_blocks(x):
            values, times, seen = x[row, block], self._output[counted, block], self._seen[counted, block]
            values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
            x[row, block] = values.sub_(frequency * times).sub_(presence * (times > 0))

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
