"""One rank's part in moving cache rows and weights where ranks write into each other's memory: the source pushes.

A plan's copies become pieces of memory (pieces.py), and a `Carrier` brings each from its address to the other: a GPU's
copy engines, on a stream beside the step's. Nobody sends and nobody receives. What orders a copy against the kernels of
its two ranks, whose steps are kernels of one stream each:

- Source rows are there. They were computed by earlier plans, whose kernels on this rank come before, or pushed here by
  a switch that has ended (below). Rows never change once they are written, and the page is pinned: rank 0 gives it to
  nobody until a plan after the one that names it has come back. So copies may run beside the step that follows. A pull
  would have to meet the source first, to know that its kernels are done.
- Target pages are free on the target. Rank 0 gave them out once the last plan that named them had come back on rank 0.
  Every rank had come to that step's last meeting by then, and after it reads no cache. The same holds for where the
  other ranks' heads go: the pages that lay there were moved away by a plan that has come back.
- Nobody reads a target page before the commit. Others write other rows of it in the meantime (the ranks that compute an
  armed row their own copy, other sources theirs): each byte is written once.
- New rows (`late_moves`) are there when the rows have run, so they are pushed in the step's own order, after them.
- The new layout reads what has come. Copies beside the step are joined to its order in `after`; the ranks' statuses,
  exchanged next, are a meeting. So when the target goes on to its next step, or rank 0 has this one's result, all that
  the plan moves has arrived. That is why copies between ranks belong to plans of an attempt, which have statuses.
- Copies inside a rank (compaction) are read by this very step, and are done in its order, before it. When the plan has
  copies between ranks too, the ranks meet in between: another rank's push may go to where a page has just been moved
  to, or where it has just been moved away from. Late rows need none: the rows have run, with all their meetings.

An error in copies between ranks is reported, as far as it shows when they are enqueued, and the switch is aborted; one
inside a rank is raised and ends the run: the block tables already point to the new page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from splash_trt.migration.pieces import Places, merged
from splash_trt.plan import Plan


class Carrier(Protocol):
    """Copies pieces [n, 3] (see pieces.py), of which none overlaps what another one writes."""

    def now(self, pieces: np.ndarray) -> None:
        """In the step's order."""
        ...

    def beside(self, pieces: np.ndarray) -> None:
        """After all that the step holds so far, and while it goes on."""
        ...

    def join(self) -> None:
        """From here on in the step's order, what was copied beside is there."""
        ...


class PeerMover:
    """`bytes_sent` counts what this rank has pushed to others, by kind. meet: returns in the step's order when every
    rank has called it and done, in its own order, all that came before."""

    def __init__(self, rank: int, places: Places, carrier: Carrier, meet: Callable[[], None]) -> None:
        self._rank = rank
        self._places = places
        self._carrier = carrier
        self._meet = meet
        self.bytes_sent = {"pages": 0, "new_rows": 0, "weights": 0}

    def before(self, plan: Plan) -> str:
        """What moves before the rows run or beside them; returns the error, empty if none."""
        local = plan.moves[:, 0] == plan.moves[:, 2]
        crossing = bool((~local).any()) or len(plan.weights) > 0
        assert plan.attempt or not (crossing or len(plan.late_moves)), "copies between ranks need a meeting after them"
        inside = self._mine(plan.moves[local])
        if len(inside):
            self._carrier.now(merged(self._places.rows(inside)))
        if crossing and local.any():
            self._meet()
        out, heads = self._mine(plan.moves[~local]), self._mine(plan.weights)
        if not len(out) and not len(heads):
            return ""
        pieces = np.concatenate((self._places.rows(out), self._places.heads(heads)))
        self.bytes_sent["pages"] += self._places.row_bytes(out)
        self.bytes_sent["weights"] += int(pieces[:, 2].sum()) - self._places.row_bytes(out)
        return self._guarded(self._carrier.beside, pieces)

    def after(self, plan: Plan) -> str:
        """New rows for the ranks of armed requests' targets that did not compute them."""
        self._carrier.join()
        late = self._mine(plan.late_moves)
        if not len(late):
            return ""
        self.bytes_sent["new_rows"] += self._places.row_bytes(late)
        return self._guarded(self._carrier.now, self._places.rows(late))

    def _mine(self, moves: np.ndarray) -> np.ndarray:
        """Those from this rank."""
        return moves[moves[:, 0] == self._rank]

    @staticmethod
    def _guarded(copy: Callable[[np.ndarray], None], pieces: np.ndarray) -> str:
        try:
            copy(merged(pieces))
        except RuntimeError as error:  # the driver's, and torch's
            return f"{type(error).__name__}: {error}"
        return ""
