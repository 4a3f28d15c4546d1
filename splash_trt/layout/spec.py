"""The four layouts as combinations of three choices, from which everything else in the code follows.

With N = 4 ranks, 8 heads (h), requests a and b, pages of one request 0 1 2 3 …:

    layout  a step's tokens             heads of rank 0..3    request a's pages on rank 0..3
    TP      all on every rank           h01 h23 h45 h67       all | all | all | all
    DP      each on its owner           all | all | all | all all |  -  |  -  |  -    (owner 0)
    CP      prompt cut by page,         all | all | all | all 0 4 | 1 5 | 2 6 | 3 7   (home 0)
            decode on its home
    DOP     all on every rank           h01 h23 h45 h67       all |  -  |  -  |  -    (owner 0)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from splash_trt.config import Layout


class Tokens(Enum):
    """Which ranks hold the hidden state of a step's tokens."""

    EVERYWHERE = "everywhere"
    SPREAD = "spread"


class Residency(Enum):
    """Which heads of the head-cut attention weights a rank holds."""

    SHARD = "shard"
    FULL = "full"


class PlacementKind(IntEnum):
    """Which ranks hold the pages of a request's cache."""

    REPLICATED = 0
    OWNED = 1
    STRIPED = 2


@dataclass(frozen=True, kw_only=True)
class LayoutSpec:
    tokens: Tokens
    residency: Residency
    placement: PlacementKind


SPECS: dict[Layout, LayoutSpec] = {
    Layout.TP: LayoutSpec(
        tokens=Tokens.EVERYWHERE, residency=Residency.SHARD, placement=PlacementKind.REPLICATED
    ),
    Layout.DP: LayoutSpec(tokens=Tokens.SPREAD, residency=Residency.FULL, placement=PlacementKind.OWNED),
    Layout.CP: LayoutSpec(tokens=Tokens.SPREAD, residency=Residency.FULL, placement=PlacementKind.STRIPED),
    Layout.DOP: LayoutSpec(tokens=Tokens.EVERYWHERE, residency=Residency.SHARD, placement=PlacementKind.OWNED),
}
