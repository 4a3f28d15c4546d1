"""Chooses what a switch copies in each plan: old cache rows and heads in the background, under a budget, and new rows
as they are computed.

A request with a second placement is armed: from the first plan on that knows of the second placement, each new cache
row is written under both. The request's backlog is the rows that were computed before that. They move in the
background, each once, so what is left to move only shrinks, however small the budget is.
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
    """Serves one switch after another; `forget` is called between two of them."""

    def __init__(self, config: EngineConfig, ledger: Ledger, sizes: Sizes) -> None:
        self._config = config
        self._ledger = ledger
        self._sizes = sizes
        self._armed = np.zeros(config.max_running, np.bool_)  # [slots]
        self._backlog = np.zeros(config.max_running, np.int64)  # [slots] number of rows
        self._moved = np.zeros(config.max_running, np.int64)  # [slots] the first so many rows of the backlog are moved
        self._heads: deque[WeightMove] = deque()  # still to be moved
        self._idle = True  # there is no switch with an armed request or with heads to move
        self._planned_rows: list[tuple[int, Move]] = []  # (slot, move)
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
        """These parts of the head-cut tensors have to be moved."""
        self._idle = self._idle and not heads
        self._heads = deque(heads)

    def forget(self) -> None:
        """The switch has been committed or aborted."""
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
        """An upper bound on what still has to come in on the rank that gets most."""
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
        """Choose what the next plan moves: rows of one request after another, then heads. False if nothing."""
        allowance = Allowance(budget_bytes, self._config.num_ranks)
        for slot in self._ledger.live().tolist():
            self._move_rows(slot, allowance, record)
        for _ in range(len(self._heads)):
            if allowance.spent:
                break
            self._move_heads(self._heads.popleft(), allowance)
        return bool(self._planned_rows or self._planned_heads)

    def drop_planned(self) -> None:
        """Forget what was chosen for the next plan."""
        self._planned_rows, self._planned_heads = [], []

    def take(self, record: Record | None) -> tuple[np.ndarray, np.ndarray]:
        """What `fill` chose, as Plan.moves [M, 6] int32 and Plan.weights [K, 5] int64; counted in the record.

        Rows of requests that gave their cache up since `fill` are left out: no plan may name their pages any more.
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
        """Plan.armed, [R] bool, for rows of these slots."""
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
        """Plan.late_moves, [M, 6] int32: new rows of armed requests go to those ranks of the second placement that do
        not compute them. Where every rank computes all tokens (tokens), every rank writes its own copy: none are sent.

        slot, start, count, absorbed: [R], as in the plan.
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
        """Rows start … start + count - 1, from where they are stored to the ranks of the second placement that lack
        them."""
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
        """Plan moves of one request's backlog, page by page, from where the last plan stopped."""
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
        """Plan as much of `move` as the budget allows; the rest goes to the end of the queue."""
        size = self._sizes.itemsize
        count = min(move.end - move.begin, allowance.room(move.source, [move.target], size))
        if count > 0:
            allowance.spend(move.source, [move.target], count * size)
            self._planned_heads.append((move.source, move.target, move.tensor, move.begin, move.begin + count))
        if move.begin + count < move.end:
            self._heads.append(WeightMove(move.source, move.target, move.tensor, move.begin + count, move.end))
