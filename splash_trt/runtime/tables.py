"""What a rank remembers between plans, per slot: block tables, sampling parameters, the id sampled last."""

from __future__ import annotations

import numpy as np
import torch

from splash_trt.plan import NO_PAGE, SAMPLING_DTYPE, Plan


class SlotTables:
    """Rows are slots. Only plans change them, and the sampler's ids."""

    def __init__(self, rank: int, max_slots: int, max_pages: int) -> None:
        self._rank = rank
        self.pages = np.full((max_slots, max_pages), NO_PAGE, np.int32)
        """[slots, pages]: this rank's page id of each page of the slot's request."""
        self.target_pages = np.full_like(self.pages, NO_PAGE)
        """[slots, pages]: the same for where the cache will be after the switch under way."""
        self._epoch = 0
        self._attempt = 0
        self.sampling = np.zeros(max_slots, SAMPLING_DTYPE)
        self.last_sampled = torch.zeros(max_slots, dtype=torch.int64)
        """[slots]: stays where the sampler runs; it never passes through the host on its way to the next step."""

    def apply(self, plan: Plan) -> bool:
        """Take over the changes that a plan carries, before its rows are read. True: it begins a new epoch."""
        begins = plan.epoch != self._epoch
        if begins:
            self.pages, self.target_pages = self.target_pages, self.pages
        if begins or plan.attempt != self._attempt:
            self.target_pages.fill(NO_PAGE)
        self._epoch, self._attempt = plan.epoch, plan.attempt
        opened = plan.sampling["slot"]
        self.sampling[opened] = plan.sampling
        self.pages[opened] = self.target_pages[opened] = NO_PAGE
        for pages, changes in ((self.pages, plan.tables), (self.target_pages, plan.target_tables)):
            mine = changes[changes[:, 0] == self._rank]
            pages[mine[:, 1], mine[:, 2]] = mine[:, 3]
        return begins

    def remember(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """slots, tokens [n] int64: what the sampler chose."""
        self.last_sampled[slots] = tokens
