"""The load that a policy looks at: the running and waiting requests as plain numbers. R running requests, N ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splash_trt.config import Layout
from splash_trt.scheduler.forecast import Arriving


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load at one moment. Tokens are counted as cache rows."""

    now: float
    layout: Layout
    num_ranks: int
    held: np.ndarray
    """[R] cache rows that are computed."""
    prefill: np.ndarray
    """[R] prompt tokens that still have to be computed (after a preemption also output tokens)."""
    generated: np.ndarray
    """[R] tokens of output so far."""
    left: np.ndarray
    """[R] expected tokens of output still to come, at most what the request's limit leaves."""
    home: np.ndarray
    """[R] owner or home; 0 in TP."""
    slots: np.ndarray
    """[R] the requests' slots."""
    waiting_prompts: np.ndarray
    """[W] tokens that each waiting request has to compute before its next new one, in the order of admission."""
    waiting_left: float
    """Expected output tokens of a waiting request, on average."""
    arriving: Arriving
    used_pages: np.ndarray
    """[N] pages that ranks hold (without those that are leaving) or reserve for running requests."""
    budget_bytes: int
    """What a rank may send or receive for a switch in a step of 10 ms or less."""

    @property
    def running(self) -> int:
        return len(self.held)

    @property
    def waiting(self) -> int:
        return len(self.waiting_prompts)

    @cached_property
    def rows(self) -> np.ndarray:
        """[N] float64: cache rows of the requests that each rank owns or is home to."""
        return np.bincount(self.home, self.held, self.num_ranks)

    @cached_property
    def held_tokens(self) -> int:
        """Cache rows of all running requests."""
        return int(self.held.sum())

    @cached_property
    def waiting_tokens(self) -> int:
        return int(self.waiting_prompts.sum())

    @cached_property
    def prompt_tokens(self) -> int:
        """Known tokens that still have to be computed, of running and waiting requests."""
        return int(self.prefill.sum()) + self.waiting_tokens

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self.waiting == 0
