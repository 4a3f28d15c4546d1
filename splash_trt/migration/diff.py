"""What a switch has to move between ranks: from where things are to where they must be, and nothing that already is.

Pure functions over placements and residencies. N ranks; rows are tokens' cache rows over all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import Residency


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that migration and capacity reckon with."""

    page_tokens: int
    row_bytes: int
    """One token's rows of all layers."""
    itemsize: int
    heads: tuple[int, ...]
    """Attention heads of each rank."""
    head_numbers: tuple[int, ...]
    """Numbers per head of each head-cut tensor, in the order of the model's tensors."""
    pages: dict[Residency, tuple[int, ...]]
    """Pages that each rank's arena holds under a residency."""

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.row_bytes

    @cached_property
    def head_bytes(self) -> np.ndarray:
        """[N] float64: of each rank's own part of the head-cut tensors."""
        return np.array(self.heads, np.float64) * sum(self.head_numbers) * self.itemsize


class PageMove(msgspec.Struct, frozen=True, gc=False):
    """Page `page_index` of a request goes from rank `source`, which holds it, to rank `target`, which does not."""

    page_index: int
    source: int
    target: int


def page_moves(
    placement: Placement, target: Placement, first_page: int, num_pages: int, num_ranks: int
) -> list[PageMove]:
    """The moves for pages first_page … first_page + num_pages - 1 of a request, page after page."""
    moves = []
    for page in range(first_page, first_page + num_pages):
        here = placement.ranks(page, num_ranks)
        moves += [PageMove(page, here[0], rank) for rank in target.ranks(page, num_ranks) if rank not in here]
    return moves


@dataclass(frozen=True)
class WeightMove:
    """Numbers [begin, end) of rank `source`'s part of head-cut tensor `tensor`, for rank `target`'s `others`."""

    source: int
    target: int
    tensor: int
    begin: int
    end: int


def weight_moves(before: Residency, after: Residency, sizes: Sizes) -> list[WeightMove]:
    """Whole parts of tensors; empty unless heads come in. Targets take turns, so that no rank sends to all at once."""
    if not (before is Residency.SHARD and after is Residency.FULL):
        return []
    ranks = range(len(sizes.heads))
    moves = []
    for tensor, numbers in enumerate(sizes.head_numbers):
        for distance in ranks[1:]:
            for target in ranks:
                source = (target + distance) % len(ranks)
                if sizes.heads[source]:
                    moves.append(WeightMove(source, target, tensor, 0, numbers * sizes.heads[source]))
    return moves

