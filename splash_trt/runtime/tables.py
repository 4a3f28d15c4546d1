"""What a rank remembers between plans, per slot: block table, sampling parameters, the id sampled last."""

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
        self.sampling = np.zeros(max_slots, SAMPLING_DTYPE)
        self.last_sampled = torch.zeros(max_slots, dtype=torch.int64)
        """[slots]: stays where the sampler runs; it never passes through the host on its way to the next step."""

    def apply(self, plan: Plan) -> None:
        """Take over the changes that a plan carries, before its rows are read."""
        mine = plan.tables[plan.tables[:, 0] == self._rank]
        self.pages[mine[:, 1], mine[:, 2]] = mine[:, 3]
        self.sampling[plan.sampling["slot"]] = plan.sampling

    def remember(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """slots, tokens [n] int64: what the sampler chose."""
        self.last_sampled[slots] = tokens
