"""One rank's part in moving cache rows and weights by collectives, for ranks that cannot map each other's memory.

Copies inside the rank come first. Then there is one all-to-all exchange, in which every rank sends each other rank all
that the plan names for it, in the plan's order. An error in the exchange is reported, not raised: the rank still takes
part, with zeros in place of what it lacks, so that the others are not left waiting; then the switch is aborted. An
error in a copy inside the rank is raised and ends the run, since the block tables already point to the new page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from splash_trt.cache.storage import PageStorage
from splash_trt.dist.collectives import Collectives
from splash_trt.plan import Plan
from splash_trt.weights.store import WeightStore


class Mover:
    """`bytes_sent` counts what this rank has sent to others, by kind."""

    def __init__(self, storage: PageStorage, weights: WeightStore, collectives: Collectives) -> None:
        self._storage = storage
        self._weights = weights
        self._comm = collectives
        self.bytes_sent = {"pages": 0, "new_rows": 0, "weights": 0}

    def before(self, plan: Plan) -> str:
        """Copy `moves` and `weights`, before the rows run. Returns the error, empty if none."""
        rank = self._comm.rank
        local = plan.moves[:, 0] == plan.moves[:, 2]
        for _, source, _, target, first, count in plan.moves[local & (plan.moves[:, 0] == rank)].tolist():
            self._storage.rows(target, first, count).copy_(self._storage.rows(source, first, count))
        return self._exchange(plan.moves[~local], plan.weights, "pages")

    def after(self, plan: Plan) -> str:
        """Send new rows of armed requests to the target ranks that did not compute them. Returns as `before`."""
        return self._exchange(plan.late_moves, plan.weights[:0], "new_rows")

    def _exchange(self, moves: np.ndarray, weights: np.ndarray, kind: str) -> str:
        if not len(moves) and not len(weights):
            return ""
        ranks, rank = range(self._comm.size), self._comm.rank
        send, expected, errors = [], [], []
        for other in ranks:
            out, error = self._guarded(partial(self._gather, moves, weights, other, kind))
            errors.append(error)
            send.append(self._blank(moves, weights, rank, other) if out is None else out)
            expected.append((self._numbers(moves, weights, other, rank),))
        received = self._comm.all_to_all(send, expected)
        for other, numbers in zip(ranks, received, strict=True):
            errors.append(self._guarded(partial(self._scatter, moves, weights, other, numbers))[1])
        return "; ".join(filter(None, errors))

    def _gather(self, moves: np.ndarray, weights: np.ndarray, target: int, kind: str) -> torch.Tensor:
        """[numbers]: all that this rank sends to `target`."""
        rank = self._comm.rank
        parts = [
            self._storage.rows(page, first, count).reshape(-1)
            for _, page, _, _, first, count in _between(moves, rank, target, 2)
        ]
        rows = sum(part.nbytes for part in parts)
        heads = [
            self._weights.own_part(tensor, begin, end)
            for _, _, tensor, begin, end in _between(weights, rank, target, 1)
        ]
        self.bytes_sent[kind] += rows
        self.bytes_sent["weights"] += sum(part.nbytes for part in heads)
        parts += heads
        return torch.cat(parts) if parts else self._blank(moves, weights, rank, target)

    def _scatter(self, moves: np.ndarray, weights: np.ndarray, source: int, numbers: torch.Tensor) -> None:
        """Put what rank `source` sent where it belongs."""
        rank, used = self._comm.rank, 0
        for _, _, _, page, first, count in _between(moves, source, rank, 2):
            rows = self._storage.rows(page, first, count)
            rows.copy_(numbers[used : used + rows.numel()].view(rows.shape))
            used += rows.numel()
        for _, _, tensor, begin, end in _between(weights, source, rank, 1):
            self._weights.others_part(source, tensor, begin, end).copy_(numbers[used : used + end - begin])
            used += end - begin

    def _numbers(self, moves: np.ndarray, weights: np.ndarray, source: int, target: int) -> int:
        """How many numbers go from `source` to `target`."""
        row = self._storage.pages[0, :, 0].numel() if len(moves) else 0
        rows = sum(move[5] for move in _between(moves, source, target, 2))
        return rows * row + sum(w[4] - w[3] for w in _between(weights, source, target, 1))

    def _blank(self, moves: np.ndarray, weights: np.ndarray, source: int, target: int) -> torch.Tensor:
        return self._storage.pages.new_zeros(self._numbers(moves, weights, source, target))

    @staticmethod
    def _guarded(copy: Callable[[], torch.Tensor | None]) -> tuple[torch.Tensor | None, str]:
        """(result, "") or (None, what went wrong)."""
        try:
            return copy(), ""
        except RuntimeError as error:  # torch's errors: out of memory, a failed copy
            return None, f"{type(error).__name__}: {error}"


def _between(moves: np.ndarray, source: int, target: int, target_column: int) -> list[list[int]]:
    """The rows of `moves` from rank `source` to rank `target`, in order."""
    return moves[(moves[:, 0] == source) & (moves[:, target_column] == target)].tolist()
