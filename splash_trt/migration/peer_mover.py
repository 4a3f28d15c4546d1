"""One rank's part in moving cache rows and weights where ranks map each other's memory: the source rank writes straight
into the target rank's memory (it pushes), and the target does nothing.

A plan's copies become pieces of memory (pieces.py). A `Carrier` copies each piece: on a GPU with its copy engines, on a
side stream. A step is a sequence of kernels on one stream per rank, the step's stream; a "meeting" is a point in it
that no rank passes before all ranks have reached it. Why no copy races with the kernels of its two ranks:

- The source rows are complete. They were computed by earlier plans, whose kernels precede the copy on this rank's
  stream, or pushed here by a switch that has ended. Rows never change after they are written, and rank 0 does not reuse
  their page until a plan after the one that names it has completed. So the copies may overlap with the step. (A pull by
  the target would first have to meet the source, to know that its kernels are done.)
- The target pages are free. Rank 0 gave them out after the last plan that named them had completed on rank 0. By then
  every rank had reached that step's last meeting, after which it reads no cache. The same holds for the memory that the
  other ranks' heads go to: the pages there were moved away by a plan that has completed.
- Nobody reads a target page before the commit. Until then several ranks may write to it: the ranks that compute new
  rows of an armed request write their own copies, and other sources push theirs. Each byte is written only once.
- New rows (`late_moves`) exist only after the plan's rows have run: they are pushed after them, on the step's stream.
- The new layout sees everything that was moved. `after` makes the step's stream wait for the side stream, and then the
  ranks exchange their statuses, which is a meeting. So everything that a plan moves has arrived before the target
  begins its next step and before rank 0 has this step's result. Only plans of a switch (`attempt`) have statuses, which
  is why only they may copy between ranks.
- Copies inside a rank (compaction) are read by this very step, so they run before it, on the step's stream. If the plan
  also copies between ranks, the ranks meet after the copies inside: a push by another rank may go to where a page has
  just been moved to, or to where it was moved away from. Late rows need no meeting of their own: the rows ran before.

An error in copies between ranks, as far as it shows when they are enqueued, is reported, and the switch is aborted. An
error in copies inside a rank is raised and ends the run, since the block tables already point to the new page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from splash_trt.migration.pieces import Places, merged
from splash_trt.plan import Plan


class Carrier(Protocol):
    """Copies pieces [n, 3] (see pieces.py), none of which overlaps what another one writes."""

    def now(self, pieces: np.ndarray) -> None:
        """Copy on the step's stream."""
        ...

    def beside(self, pieces: np.ndarray) -> None:
        """Copy on a side stream: after what is on the step's stream already, overlapping with what comes next."""
        ...

    def join(self) -> None:
        """What comes next on the step's stream waits for the copies on the side stream."""
        ...


class PeerMover:
    """`bytes_sent` counts what this rank has pushed to others, by kind. meet: puts a meeting on the step's stream; what
    comes after it on any rank runs after what came before it on all ranks."""

    def __init__(self, rank: int, places: Places, carrier: Carrier, meet: Callable[[], None]) -> None:
        self._rank = rank
        self._places = places
        self._carrier = carrier
        self._meet = meet
        self.bytes_sent = {"pages": 0, "new_rows": 0, "weights": 0}

    def before(self, plan: Plan) -> str:
        """Copy `moves` and `weights`, before the rows run or while they do. Returns the error, empty if none."""
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
        """Push new rows of armed requests to the target ranks that did not compute them. Returns as `before`."""
        self._carrier.join()
        late = self._mine(plan.late_moves)
        if not len(late):
            return ""
        self.bytes_sent["new_rows"] += self._places.row_bytes(late)
        return self._guarded(self._carrier.now, self._places.rows(late))

    def _mine(self, moves: np.ndarray) -> np.ndarray:
        """Those whose source is this rank."""
        return moves[moves[:, 0] == self._rank]

    @staticmethod
    def _guarded(copy: Callable[[np.ndarray], None], pieces: np.ndarray) -> str:
        try:
            copy(merged(pieces))
        except RuntimeError as error:  # the driver's, and torch's
            return f"{type(error).__name__}: {error}"
        return ""
