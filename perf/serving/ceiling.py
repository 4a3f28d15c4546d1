"""The ceiling: how fast a rollout could be if each step had the layout that is fastest for it, switches cost nothing,
and there were room for all requests.

Computed from the step times that perf.engines.step_time has measured: decode medians by batch and context, and the
highest rate at which a prompt was prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perf import harness


class StepTimes:
    """Milliseconds of decode steps by layout; between measured cells interpolated linearly in the logarithms."""

    def __init__(self, decode: Sequence[harness.Row], prefill: Sequence[harness.Row]) -> None:
        self._grids = {layout: _grid([row for row in decode if row["layout"] == layout]) for layout in _layouts(decode)}
        self.prefill_tokens_per_s = max(float(row["tokens_per_s"] or 0) for row in prefill)

    @classmethod
    def read(cls, folder: Path, ranks: int, prefix: str = "") -> StepTimes:
        """The times for a number of ranks, from a folder's step_time.json and prefill.json. ValueError if these are
        refused."""
        files = [harness.read(folder / f"{prefix}{name}.json").rows for name in ("step_time", "prefill")]
        decode, prefill = ([row for row in rows if row["ranks"] == ranks] for rows in files)
        return cls(decode, prefill)

    @property
    def layouts(self) -> list[str]:
        return list(self._grids)

    def decode_ms(self, layout: str, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """batch, context [n] -> milliseconds [n]; outside of what was measured, those of the nearest cell."""
        batches, contexts, log_ms = self._grids[layout]
        i, u = _between(batches, batch)
        j, v = _between(contexts, context)
        low = (1 - v) * log_ms[i, j] + v * log_ms[i, j + 1]
        high = (1 - v) * log_ms[i + 1, j] + v * log_ms[i + 1, j + 1]
        return np.exp((1 - u) * low + u * high)


def rollout_s(times: StepTimes, prompt: int, outputs: Sequence[int], layouts: Sequence[str]) -> float:
    """Seconds until all answers are complete, with the best of `layouts` at each step. All prompts come at once."""
    lengths = np.sort(np.asarray(outputs))
    step = np.arange(1, int(lengths[-1]))  # the first token of each comes with its prompt
    batch = len(lengths) - np.searchsorted(lengths, step, side="right")
    decode_ms = np.min([times.decode_ms(layout, batch, prompt + step) for layout in layouts], axis=0)
    return len(lengths) * prompt / times.prefill_tokens_per_s + float(decode_ms.sum()) / 1e3


def _layouts(rows: Sequence[harness.Row]) -> list[str]:
    return list(dict.fromkeys(str(row["layout"]) for row in rows))


def _grid(rows: Sequence[harness.Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logarithms of batches [b], of contexts [c] and of milliseconds [b, c]. A cell that was left out has the value of
    the next smaller context. If an axis has a single value, that is repeated."""
    batches = sorted({float(row["batch"] or 0) for row in rows})
    contexts = sorted({float(row["context"] or 0) for row in rows})
    known = {(row["batch"], row["context"]): float(row["median_ms"] or 0) for row in rows}
    table = np.zeros((len(batches), len(contexts)))
    for i, batch in enumerate(batches):
        for j, context in enumerate(contexts):
            table[i, j] = known.get((batch, context), table[i, j - 1])
    assert (table > 0).all(), "a batch was not measured at the smallest context"
    rows_twice, columns_twice = (1 if len(axis) > 1 else 2 for axis in (batches, contexts))
    table = np.repeat(np.repeat(table, rows_twice, axis=0), columns_twice, axis=1)
    return np.log(batches * rows_twice), np.log(contexts * columns_twice), np.log(table)


def _between(axis: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each value the index of the lower end of its interval on the axis, and how far it is towards the upper end, 0
    to 1."""
    x = np.log(np.maximum(values, 1))
    index = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
    width = axis[index + 1] - axis[index]
    share = np.divide(x - axis[index], width, out=np.zeros_like(x), where=width > 0)
    return index, np.clip(share, 0.0, 1.0)
