"""Which ranks hold which pages of a request, for each kind of placement. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splash_trt.layout.spec import PlacementKind

REPLICATED, OWNED, STRIPED = (int(kind) for kind in PlacementKind)  # numpy is slow to compare with an enumeration


@dataclass(frozen=True)
class Placement:
    """Where one request's cache lives.

    `home` is the owner (OWNED) or the rank of page 0 (STRIPED); REPLICATED has no use for it.
    """

    kind: PlacementKind
    home: int = 0

    def ranks(self, page: int, num_ranks: int) -> Sequence[int]:
        """The ranks that hold a page, ascending."""
        if self.kind is PlacementKind.REPLICATED:
            return range(num_ranks)
        return ((self.home + page) % num_ranks if self.kind is PlacementKind.STRIPED else self.home,)

    def holders(self, first_page: int, num_pages: int, num_ranks: int) -> np.ndarray:
        """[num_pages, N] bool: whether rank n holds page first_page + i."""
        if self.kind is PlacementKind.REPLICATED:
            return np.ones((num_pages, num_ranks), np.bool_)
        if self.kind is PlacementKind.OWNED:
            rank = np.full(num_pages, self.home)
        else:
            rank = (self.home + first_page + np.arange(num_pages)) % num_ranks
        return rank[:, None] == np.arange(num_ranks)

    def pages_per_rank(self, num_pages: int, num_ranks: int, *, first_page: int = 0) -> np.ndarray:
        """[N] int64: pages that each rank holds of pages first_page … first_page + num_pages - 1."""
        if self.kind is PlacementKind.REPLICATED:
            return np.full(num_ranks, num_pages)
        distance = (np.arange(num_ranks) - self.home - first_page) % num_ranks
        if self.kind is PlacementKind.OWNED:
            return np.where(np.arange(num_ranks) == self.home, num_pages, 0)
        return (num_pages - distance + num_ranks - 1) // num_ranks


def holders_of(kind: np.ndarray, home: np.ndarray, page: np.ndarray, num_ranks: int) -> np.ndarray:
    """[n, N] bool: Placement.holders for many requests: of page page[i] under the placement kind[i], home[i]."""
    rank = (home + page * (kind == STRIPED)) % num_ranks
    return (rank[:, None] == np.arange(num_ranks)) | (kind == REPLICATED)[:, None]


def num_pages(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold num_tokens rows."""
    return -(-num_tokens // page_tokens)
