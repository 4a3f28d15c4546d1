"""Which slots and pages requests hold, and the changes to them that the next plan has to tell the ranks.

The scheduler opens, grows and closes requests here, and a switch gives them second placements and moves pages. As both
do it through this class, the changes that plans carry always match the directory.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from splash_trt.cache.compaction import compact
from splash_trt.cache.directory import Added, Directory, Entry
from splash_trt.cache.placement import Placement
from splash_trt.plan import NO_TABLES
from splash_trt.scheduler.sequence import Sequence
from splash_trt.scheduler.slots import Slots


class Changes(msgspec.Struct):
    """Changes for the next plan, in the form of the plan's fields; opened: requests that have just got a slot."""

    tables: list[np.ndarray] = []
    target_tables: list[np.ndarray] = []
    local_moves: list[tuple[int, int, int, int, int, int]] = []
    opened: list[Sequence] = []


class Ledger:
    """Slots, pages and pending changes. In the calls, `closed_after` is the last plan sent: what is given back may be
    used again when that plan has completed."""

    def __init__(self, limits: tuple[int, ...], max_slots: int, page_tokens: int) -> None:
        self.directory = Directory(limits)
        self.slots = Slots(max_slots)
        self.running_at = np.zeros(len(limits), np.int64)
        """[N]: running requests by home."""
        self._page_tokens = page_tokens
        self._changes = Changes()
        self._closed: deque[tuple[int, int]] = deque()  # (last plan that may name it, slot), in the plans' order

    def open(self, sequence: Sequence, placement: Placement, target: Placement | None, num_pages: int) -> None:
        """Give a slot and pages to a request that has none; there must be room."""
        entry = self.directory.open(sequence.id, placement, target)
        slot = self.slots.open(sequence, placement.home, entry.index)
        self.running_at[placement.home] += 1
        self._told(self.directory.grow(sequence.id, num_pages), np.array([slot]))
        self.slots.pages[slot] = num_pages
        self._changes.opened.append(sequence)

    def entry(self, slot: int) -> Entry:
        """The pages of a live slot's request."""
        return self.directory[self.slots.sequence(slot).id]

    def most_junior_at(self, rank: int) -> int:
        """The slot that is to give its cache up first, among those whose requests have a page on `rank`."""
        live = self.live()
        there = live[self.directory.present(rank, self.slots.entry[live])]
        assert len(there), f"rank {rank} is full, yet no request has a page there"
        seniority = self.slots.seniority[there]
        last = there[seniority == seniority.min()]
        return int(last[self.slots.arrival[last].argmax()])

    def shortfall(self, slot: int) -> np.ndarray:
        """[N] int64: how many pages each rank lacks for one more page of this slot's request."""
        need = self.directory.needed(self.slots.sequence(slot).id, 1)
        return np.maximum(need - self.directory.free_pages(), 0)

    def grow(self, slots: np.ndarray) -> int:
        """Give one more page to each of these slots [n], in order, until some rank has none left. Returns how many got
        theirs."""
        count, added = self.directory.grow_each(self.slots.entry[slots])
        self._told(added, slots)
        self.slots.pages[slots[:count]] += 1
        return count

    def _told(self, added: Added, slots: np.ndarray) -> None:
        """Note pages that the requests in `slots` got, for the next plan."""
        for changes, parts in (
            (added.tables, self._changes.tables),
            (added.target_tables, self._changes.target_tables),
        ):
            if len(changes):
                parts.append(_with_slots(changes, slots))

    def close(self, sequence: Sequence, *, closed_after: int) -> None:
        """Give a request's slot and pages back; they are free once no plan in flight names them (`reclaim`)."""
        slot = sequence.slot
        self.running_at[self.slots.home[slot]] -= 1
        self.slots.close(slot)
        self._closed.append((closed_after, slot))
        self.directory.close(sequence.id, step=closed_after)

    def reclaim(self, completed: int) -> None:
        """Plan `completed` and all before it have completed on all ranks: free what only they named."""
        self.directory.completed(completed)
        while self._closed and self._closed[0][0] <= completed:
            self.slots.release(self._closed.popleft()[1])

    def compact(self, rank: int, limit: int, budget_pages: int, *, step: int) -> int:
        """Have plan `step`, the next one, move up to budget_pages of a rank's pages below `limit`; returns how many."""
        moved = compact(self.directory, rank, limit, budget_pages, step=step)
        for m in moved:
            change = np.array([[rank, self._slot_of(m.request_id), m.page_index, m.new]], np.int32)
            self._changes.tables.append(change)
            if m.shared:
                self._changes.target_tables.append(change)
            self._changes.local_moves.append((rank, m.old, rank, m.new, 0, self._page_tokens))
        return len(moved)

    def retarget(self, slot: int, target: Placement) -> None:
        """Give a running request a second placement; there must be room."""
        changes = self.directory.retarget(self.slots.sequence(slot).id, target)
        self._changes.target_tables.append(_with_slots(changes, np.array([slot])))

    def commit_targets(self, *, step: int) -> None:
        """Second placements become the placements. Plan `step`, the last one sent, is the last under the old ones."""
        self.running_at[:] = 0
        for slot in self.live().tolist():
            request_id = self.slots.sequence(slot).id
            self.directory.commit(request_id, step=step)
            home = self.directory[request_id].placement.home
            self.slots.home[slot] = home
            self.running_at[home] += 1

    def drop_targets(self, *, step: int) -> None:
        """Forget all second placements."""
        for request_id in self.directory:
            if self.directory[request_id].target is not None:
                self.directory.drop_target(request_id, step=step)
        self._changes.target_tables.clear()

    def live(self) -> np.ndarray:
        """Slots whose requests hold cache, ascending."""
        return self.slots.live.nonzero()[0]

    def take_changes(self) -> Changes:
        """The changes since the last call, for the next plan."""
        changes, self._changes = self._changes, Changes()
        return changes

    def keep_changes(self, changes: Changes) -> None:
        """Undo take_changes: no plan was made."""
        self._changes = changes

    def check_idle(self) -> None:
        """Asserts that everything was given back; to be called when no request is left."""
        self.directory.check()
        assert (self.directory.free_pages() == self.directory.limits()).all(), "pages were not given back"
        assert not self.slots.live.any() and not self._closed and not self.running_at.any()

    def _slot_of(self, request_id: str) -> int:
        return next(int(s) for s in self.live() if self.slots.sequence(int(s)).id == request_id)


def _with_slots(changes: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[C, 4] as in Added, with the index into `slots` in column 1 replaced by the slot, as plans have it. In place."""
    changes[:, 1] = slots[changes[:, 1]]
    return changes


def stacked(parts: list[np.ndarray]) -> np.ndarray:
    """All parts as one array [C, 4] int32."""
    return np.concatenate(parts) if parts else NO_TABLES
