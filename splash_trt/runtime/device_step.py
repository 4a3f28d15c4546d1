"""What a step's program works on: the step's arrays on the device, and the rank's memory, whose addresses are fixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splash_trt.cache.storage import PageStorage
from splash_trt.runtime.shapes import Shape
from splash_trt.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class DeviceRound:
    """A Round's arrays on the device, int32. tiles: of tiles_of in plugins/mla_attention/tiles.py."""

    num_rows: int
    holder: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    segments: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """StepArrays on the device."""

    shape: Shape
    arrays: dict[str, torch.Tensor]
    counts: tuple[int, ...]
    absorbed_counts: tuple[int, ...]
    rounds: tuple[DeviceRound, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank's memory that programs read and write besides a step's arrays; its addresses never change."""

    weights: WeightStore
    storage: PageStorage
    tables: torch.Tensor
    """[slots, pages] int32: this rank's block tables."""
    last_sampled: torch.Tensor
    """[slots + 1] int64; the last one is for padding."""
    context: torch.Tensor
    """[context_block_tokens, W] workspace."""
    expanded: torch.Tensor
    """Flat workspace: keys and values of a context block, for all heads."""
