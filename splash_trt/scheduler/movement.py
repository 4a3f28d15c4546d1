"""What a switch copies, plan by plan: rows and heads in the background under a budget, new rows as they are computed.

A request that has a second placement is armed: from the first plan on that knows of it, each new cache row is written
under both placements. Its backlog are the rows that were computed before; they move in the background, each once. So
what is left to move only ever shrinks, however small the budget.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from splash_trt.config import EngineConfig
from splash_trt.layout.spec import Tokens
from splash_trt.layout.switch import Record
from splash_trt.migration.budget import Allowance
from splash_trt.migration.diff import Sizes, WeightMove, page_moves
from splash_trt.plan import NO_MOVES, NO_WEIGHTS
from splash_trt.scheduler.ledger import Ledger

Move = tuple[int, int, int, int, int, int]
"""As in a plan: source rank, source page, target rank, target page, first row, rows."""


class Movement:
    """For one switch after the other; `forget` lies between two of them."""

    def __init__(self, config: EngineConfig, ledger: Ledger, sizes: Sizes) -> None:
        self._config = config
        self._ledger = ledger
        self._sizes = sizes
        self._armed = np.zeros(config.max_running, np.bool_)  # [slots]
        self._backlog = np.zeros(config.max_running, np.int64)  # [slots] rows
        self._moved = np.zeros(config.max_running, np.int64)  # [slots] rows of the backlog, from the first on
        self._heads: deque[WeightMove] = deque()
        self._idle = True  # nothing has been armed or has to be brought since the last switch
        self._planned_rows: list[tuple[int, Move]] = []  # with their slots
        self._planned_heads: list[tuple[int, int, int, int, int]] = []

    # What is to be moved

    def arm(self, slot: int) -> None:
        """The slot's request has got a second placement; its rows so far become its backlog."""
        self._idle = False
        self._armed[slot] = True
        self._backlog[slot] = self._ledger.slots.computed[slot]
        self._moved[slot] = 0

    def disarm(self, slot: int) -> None:
        """The slot has a new request, without a second placement."""
        self._armed[slot] = False

    def bring(self, heads: list[WeightMove]) -> None:
        """These parts of the head-cut tensors have to come in."""
        self._idle = self._idle and not heads
        self._heads = deque(heads)

    def forget(self) -> None:
        """The switch is over, or will not be."""
        self._idle = True
        self._armed[:] = False
        self._heads.clear()
        self.drop_planned()

    @property
    def rows_to_move(self) -> int:
        """The backlog of all running requests."""
        return int(self._backlog[self._ledger.live()].sum())

    @property
    def bytes_left(self) -> int:
        """What still has to come in, at most, on the rank that gets most of it."""
        if self._idle:
            return 0
        live = self._ledger.live()
        rows = int((self._backlog[live] - self._moved[live]).sum()) if self._armed[live].any() else 0
        heads = np.zeros(self._config.num_ranks, np.int64)
        for move in self._heads:
            heads[move.target] += move.end - move.begin
        return rows * self._sizes.row_bytes + int(np.max(heads)) * self._sizes.itemsize

    @property
    def all_planned(self) -> bool:
        """Every row and head that has to move has been put into a plan."""
        live = self._ledger.live()
        return not self._heads and bool((self._moved[live] == self._backlog[live]).all())

    # What the next plan carries

    def fill(self, budget_bytes: int, record: Record) -> bool:
        """Choose what the next plan moves: rows of one request after the other, then heads. Whether there is any."""
        allowance = Allowance(budget_bytes, self._config.num_ranks)
        for slot in self._ledger.live().tolist():
            self._move_rows(slot, allowance, record)
        for _ in range(len(self._heads)):
            if allowance.spent:
                break
            self._move_heads(self._heads.popleft(), allowance)
        return bool(self._planned_rows or self._planned_heads)

    def drop_planned(self) -> None:
        """The next plan moves nothing (yet)."""
        self._planned_rows, self._planned_heads = [], []

    def take(self, record: Record | None) -> tuple[np.ndarray, np.ndarray]:
        """([M, 6] int32, [K, 5] int64) for the next plan's `moves` and `weights`; what they move counts in the record.

        Without those of requests that have given their cache up since `fill`: no plan may name it any more.
        """
        if not self._planned_rows and not self._planned_heads:
            return NO_MOVES, NO_WEIGHTS
        live = self._ledger.slots.live
        moves = np.array([move for slot, move in self._planned_rows if live[slot]], np.int32).reshape(-1, 6)
        weights = np.array(self._planned_heads, np.int64).reshape(-1, 5)
        if record is not None:
            record.bytes_between_ranks["pages"] += int(moves[:, 5].sum()) * self._sizes.row_bytes
            record.bytes_between_ranks["weights"] += int((weights[:, 4] - weights[:, 3]).sum()) * self._sizes.itemsize
        self.drop_planned()
        return moves, weights

    def armed(self, slots: np.ndarray) -> np.ndarray:
        """[R] bool for a plan's rows."""
        return self._armed[slots]

    def late_moves(
        self,
        tokens: Tokens,
        slot: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
        absorbed: np.ndarray,
        record: Record | None,
    ) -> np.ndarray:
        """[M, 6] int32: new rows of armed requests, for the ranks of their targets that do not compute them.

        tokens: where the plan's layout has them; slot, start, count, absorbed [R] of the plan's rows. Where tokens are
        everywhere, every rank writes its own.
        """
        if self._idle:
            return NO_MOVES
        moves: list[Move] = []
        if tokens is not Tokens.EVERYWHERE:
            for row in np.flatnonzero(self._armed[slot]).tolist():
                moves += self._new_rows(int(slot[row]), int(start[row]), int(count[row]), bool(absorbed[row]))
        if record is not None:
            record.bytes_between_ranks["new_rows"] += sum(move[5] for move in moves) * self._sizes.row_bytes
        return np.array(moves, np.int32).reshape(-1, 6)

    # One request, one tensor

    def _new_rows(self, slot: int, start: int, count: int, absorbed: bool) -> list[Move]:
        """Rows start … start + count - 1 from where they are stored to the ranks of the target that lack them."""
        entry = self._ledger.entry(slot)
        assert entry.target is not None
        moves: list[Move] = []
        position, end = start, start + count
        while position < end:
            page, first = divmod(position, self._config.page_tokens)
            rows = min(self._config.page_tokens - first, end - position)
            for move in page_moves(entry.placement, entry.target, page, 1, self._config.num_ranks):
                if absorbed and move.target == entry.placement.home:
                    continue  # a decode token is computed at home, which writes its own copy
                here, there = entry.page(page, move.source), entry.target_page(page, move.target)
                moves.append((move.source, here, move.target, there, first, rows))
            position += rows
        return moves

    def _move_rows(self, slot: int, allowance: Allowance, record: Record) -> None:
        """Rows of one request's backlog, page by page, from where the last plan left off."""
        size, unit = self._config.page_tokens, self._sizes.row_bytes
        entry = self._ledger.entry(slot)
        assert entry.target is not None
        rows, backlog = int(self._moved[slot]), int(self._backlog[slot])
        while rows < backlog:
            page, first = divmod(rows, size)
            count = min(size - first, backlog - rows)
            moves = page_moves(entry.placement, entry.target, page, 1, self._config.num_ranks)
            if moves:
                source, targets = moves[0].source, [move.target for move in moves]
                count = min(count, allowance.room(source, targets, unit))
                if count <= 0:
                    break
                allowance.spend(source, targets, count * unit)
                here = entry.page(page, source)
                for target in targets:
                    there = entry.target_page(page, target)
                    self._planned_rows.append((slot, (source, here, target, there, first, count)))
            rows += count
        record.rows_moved += rows - int(self._moved[slot])
        self._moved[slot] = rows

    def _move_heads(self, move: WeightMove, allowance: Allowance) -> None:
        """The first part of `move` that the budget allows; the rest goes back to wait."""
        size = self._sizes.itemsize
        count = min(move.end - move.begin, allowance.room(move.source, [move.target], size))
        if count > 0:
            allowance.spend(move.source, [move.target], count * size)
            self._planned_heads.append((move.source, move.target, move.tensor, move.begin, move.begin + count))
        if move.begin + count < move.end:
            self._heads.append(WeightMove(move.source, move.target, move.tensor, move.begin + count, move.end))
