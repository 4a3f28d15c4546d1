"""Finds pages for the next tokens of running requests, and preempts requests when there are none left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from splash_trt.layout.switch import Abort
from splash_trt.scheduler.ledger import Ledger
from splash_trt.scheduler.sequence import Sequence
from splash_trt.scheduler.switcher import Switcher


class Growth:
    """preempt: takes a request's cache away and puts it back into the queue."""

    def __init__(
        self, ledger: Ledger, switcher: Switcher, page_tokens: int, preempt: Callable[[Sequence], None]
    ) -> None:
        self._ledger = ledger
        self._slots = ledger.slots
        self._switcher = switcher
        self._page_tokens = page_tokens
        self._preempt = preempt

    def decodes(self, *, sent: int, now: float) -> np.ndarray:
        """Slots that decode one token in this step; each has a page for it. sent: the last plan made."""
        s = self._slots
        ready = s.live & (s.computed == s.total - 1) & (s.computed >= s.admitted) & (s.total < s.limit)
        full = (ready & (s.computed >= s.pages * self._page_tokens)).nonzero()[0]
        if len(full):
            if len(full) > self._ledger.directory.least_free():  # otherwise all get their page, in whatever order
                full = s.senior_first(full)
            full = full[self._ledger.grow(full) :]
        if len(full):
            self._squeeze(full, ready, sent, now)
            ready &= s.live
        return ready.nonzero()[0]

    def _squeeze(self, full: np.ndarray, ready: np.ndarray, sent: int, now: float) -> None:
        """Make room for one more page of each slot in `full`, senior ones first; a rank that the first one needs has no
        page left.

        ready [slots] bool, changed in place: slots that have to wait for their page are taken out.
        """
        s = self._slots
        awaited = np.zeros(self._ledger.directory.num_ranks, np.int64)  # leaving pages that earlier slots wait for
        while len(full):
            slot, full = int(full[0]), full[1:]
            self._make_room(slot, awaited, sent, now)
            ready[slot] = s.live[slot] and self._ledger.grow(np.array([slot])) > 0  # an abort leaves room at once
            full = full[s.live[full]]
            full = full[self._ledger.grow(full) :]

    def _make_room(self, slot: int, awaited: np.ndarray, sent: int, now: float) -> None:
        """Have pages given back until enough are leaving for one more page of `slot`.

        First a switch under way is aborted if that frees pages on the full rank, then the most junior requests there
        are preempted, which may come to the request itself. awaited [N]: leaving pages that earlier slots wait for; the
        pages that this slot waits for are added.
        """
        lacking = self._ledger.shortfall(slot)
        while (short := lacking > self._ledger.directory.leaving_pages() - awaited).any():
            rank = int(np.argmax(short))
            if self._switcher.yields_room(rank):
                why = f"no room: rank {rank} has no page for a running request"
                self._switcher.abort(Abort.NO_ROOM, why, sent=sent, now=now)
                lacking = self._ledger.shortfall(slot)
                continue
            victim = self._ledger.most_junior_at(rank)
            self._preempt(self._slots.sequence(victim))
            if victim == slot:
                return
        awaited += lacking
