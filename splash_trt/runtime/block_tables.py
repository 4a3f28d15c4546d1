"""What a rank remembers of each slot between plans, on the host: block tables and sampling parameters.

It keeps the block tables of every rank, since it may read context rows from other ranks' pages (context_rounds.py).
"""

from __future__ import annotations

import numpy as np

from splash_trt.plan import NO_PAGE, SAMPLING_DTYPE, Plan


class BlockTables:
    """Rows are slots. Only plans change them."""

    def __init__(self, rank: int, num_ranks: int, max_slots: int, max_pages: int) -> None:
        self._rank = rank
        self.all_pages = np.full((num_ranks, max_slots, max_pages), NO_PAGE, np.int32)
        """[N, slots, pages]: each rank's page id of each page of the slot's request."""
        self._all_targets = np.full_like(self.all_pages, NO_PAGE)
        self._epoch = 0
        self._attempt = 0
        self.sampling = np.zeros(max_slots, SAMPLING_DTYPE)

    @property
    def pages(self) -> np.ndarray:
        """[slots, pages] of this rank."""
        return self.all_pages[self._rank]

    @property
    def target_pages(self) -> np.ndarray:
        """[slots, pages] of this rank: where the cache will be after the switch under way."""
        return self._all_targets[self._rank]

    def apply(self, plan: Plan) -> bool:
        """Take over a plan's changes, before its rows are read. True: the plan begins a new epoch."""
        begins = plan.epoch != self._epoch
        if begins:
            self.all_pages, self._all_targets = self._all_targets, self.all_pages
        if begins or plan.attempt != self._attempt:
            self._all_targets.fill(NO_PAGE)
        self._epoch, self._attempt = plan.epoch, plan.attempt
        opened = plan.sampling["slot"]
        self.sampling[opened] = plan.sampling
        self.all_pages[:, opened] = self._all_targets[:, opened] = NO_PAGE
        for pages, changes in ((self.all_pages, plan.tables), (self._all_targets, plan.target_tables)):
            pages[changes[:, 0], changes[:, 1], changes[:, 2]] = changes[:, 3]
        return begins

    def own_changes(self, plan: Plan) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """What the plan changed in this rank's block tables and in its target tables, to be called after `apply`. For
        each: (indices [n] int64 into the flattened table, the entries there now [n] int32).

        A plan may change an entry twice (a page that is new in a target table and also moved by compaction). Both times
        it has the final value here, since a device may write the two in either order.
        """
        return self._own(plan.tables, self.pages), self._own(plan.target_tables, self.target_pages)

    def _own(self, changes: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slot, index = changes[changes[:, 0] == self._rank, 1:3].T
        return slot.astype(np.int64) * pages.shape[1] + index, pages[slot, index]
