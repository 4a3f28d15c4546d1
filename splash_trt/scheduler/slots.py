"""The requests that hold cache, as arrays over slots, so that a step over thousands of them costs a few numpy calls."""

from __future__ import annotations

import heapq

import numpy as np

from splash_trt.scheduler.sequence import Sequence


class Slots:
    """Arrays [max_slots]; a slot's entries are valid while it is `live`."""

    def __init__(self, max_slots: int) -> None:
        self.live = np.zeros(max_slots, np.bool_)
        self.total = np.zeros(max_slots, np.int64)
        """Tokens, those included that plans in flight sample and whose ids are not known here yet."""
        self.admitted = np.zeros(max_slots, np.int64)
        """Tokens that were known at admission: plans carry their ids; later ones are taken from the sampler."""
        self.computed = np.zeros(max_slots, np.int64)
        """Tokens that are in a plan already."""
        self.prompt = np.zeros(max_slots, np.int64)
        """Tokens of the prompt."""
        self.limit = np.zeros(max_slots, np.int64)
        """The most tokens, prompt included."""
        self.entry = np.zeros(max_slots, np.int64)
        """The index of the request's entry in the directory."""
        self.pages = np.zeros(max_slots, np.int64)
        """Number of pages, as in the directory."""
        self.home = np.zeros(max_slots, np.int32)
        """Owner or home rank, as in the directory."""
        self.last_row = np.zeros(max_slots, np.int64)
        """The last plan with a row of the request."""
        self.seniority = np.zeros(max_slots, np.int64)
        self.arrival = np.zeros(max_slots, np.int64)
        """As in Sequence."""
        self.controlled = np.zeros(max_slots, np.bool_)
        """Live, and its SamplingParams are `controlled`."""
        self.sequences = np.full(max_slots, None, np.object_)  # Sequence or None
        self._free = list(range(max_slots))

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def open(self, sequence: Sequence, home: int, entry: int) -> int:
        """Give the sequence, which has no pages yet, the lowest free slot; returns the slot."""
        slot = heapq.heappop(self._free)
        self.live[slot] = True
        self.total[slot] = self.admitted[slot] = len(sequence.tokens)
        self.computed[slot] = 0
        self.prompt[slot] = len(sequence.request.prompt)
        self.pages[slot] = 0
        self.entry[slot] = entry
        self.limit[slot] = sequence.limit
        self.home[slot] = home
        self.last_row[slot] = 0
        self.seniority[slot], self.arrival[slot] = sequence.seniority, sequence.arrival
        self.controlled[slot] = sequence.request.sampling.controlled
        self.sequences[slot] = sequence
        sequence.slot = slot
        return slot

    def close(self, slot: int) -> None:
        """No rows any more; the slot itself is given back later (`release`), when no plan names it."""
        sequence = self.sequence(slot)
        assert self.live[slot]
        self.live[slot] = False
        self.controlled[slot] = False
        self.sequences[slot] = None
        sequence.slot, sequence.last_row = -1, int(self.last_row[slot])

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def senior_first(self, slots: np.ndarray) -> np.ndarray:
        """The same slots, by seniority and then arrival."""
        if len(slots) < 2:
            return slots
        return slots[np.lexsort((self.arrival[slots], -self.seniority[slots]))]

    def sequence(self, slot: int) -> Sequence:
        sequence: Sequence | None = self.sequences[slot]
        assert sequence is not None
        return sequence
