"""The requests that hold cache, as arrays over slots, so that a step over thousands of them costs a few numpy calls."""

from __future__ import annotations

import heapq

import numpy as np

from splash_trt.scheduler.sequence import Sequence


class Slots:
    """Arrays [max_slots]; a slot's entries mean something while `live`.

    total: tokens, those included that are sampled but not yet known here; admitted: tokens that were known at
    admission (up to there rows carry ids, from there on they follow the sampler); computed: tokens whose rows are
    planned; prompt: tokens of the prompt; limit: most tokens; entry: names its pages in the directory, of which pages
    (how many) and home (owner or home rank) are copies; last_row: the last plan with a row of it; seniority and
    arrival: its place among the others (Sequence.key).
    """

    def __init__(self, max_slots: int) -> None:
        self.live = np.zeros(max_slots, np.bool_)
        self.total = np.zeros(max_slots, np.int64)
        self.admitted = np.zeros(max_slots, np.int64)
        self.computed = np.zeros(max_slots, np.int64)
        self.prompt = np.zeros(max_slots, np.int64)
        self.pages = np.zeros(max_slots, np.int64)
        self.limit = np.zeros(max_slots, np.int64)
        self.entry = np.zeros(max_slots, np.int64)
        self.home = np.zeros(max_slots, np.int32)
        self.last_row = np.zeros(max_slots, np.int64)
        self.seniority = np.zeros(max_slots, np.int64)
        self.arrival = np.zeros(max_slots, np.int64)
        self.controlled = np.zeros(max_slots, np.bool_)
        """Live, and its SamplingParams are `controlled`."""
        self.sequences = np.full(max_slots, None, np.object_)  # Sequence or None
        self._free = list(range(max_slots))

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def open(self, sequence: Sequence, home: int, entry: int) -> int:
        """Give the sequence the lowest free slot and return it; it has no pages yet."""
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
