"""The layout of a rank's mailbox: the memory that other ranks read from, and write to, inside a step.

    [ flags | tokens of half 0, half 1 | slots of half 0: N | slots of half 1: N | half 0 | half 1 ]

Ranks meet by the flags (plugins/peer_rows/kernel.py). Few rows are pushed into tokens and slots (push_kernel.py). The
two halves hold, in turn, what other ranks read (peers_cuda.py says why two are enough).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splash_plugins.peer_rows import kernel
from splash_trt.models.config import ModelConfig

ALIGNMENT = 256
SLOT_BYTES = 1 << 20
"""The most that a rank can push to each other rank in one operation."""
SLOTS_BYTES = 2 * kernel.MAX_RANKS * SLOT_BYTES
SLOTS_AT = kernel.FLAG_BYTES + 2 * ALIGNMENT
HALVES_AT = SLOTS_AT + SLOTS_BYTES
_WANTED_BYTES = 16
"""What a rank tells the others of a wanted position: a score and an id (fast_sampler.py)."""
_MOST_ADDED = 256
"""How many more wanted positions than rows a padded step has: one for each request that may end its prompt in it
(shapes.py)."""


def half_bytes(model: ModelConfig, itemsize: int, stacked: int, absorbed: int) -> int:
    """The bytes that a half has to hold. stacked: the most rows of a step over all ranks, padding included; absorbed:
    the most of them that attend absorbed."""
    heads, width, latent = model.num_heads, model.row_width, model.kv_lora_rank
    wide = max(itemsize, 4)
    queries = absorbed * (heads + 1) * width * itemsize
    parts = absorbed * heads * (latent * itemsize + wide)
    wanted = (stacked + _MOST_ADDED) * _WANTED_BYTES
    return _aligned(max(stacked * model.hidden_size * itemsize, queries, parts, wanted) + 2 * ALIGNMENT)


def mailbox_bytes(half: int) -> int:
    """The size of a mailbox whose halves hold `half` bytes each."""
    return HALVES_AT + 2 * _aligned(half)


@dataclass(frozen=True)
class Mapped:
    """A range of memory that every rank has and maps into all others. `bytes`: this rank's own range, uint8;
    `addresses` [N]: where this rank sees each rank's range."""

    bytes: torch.Tensor
    addresses: Sequence[int]


class Mailbox:
    """Gives out the memory of this rank's mailbox; one of its halves is the current one. Places are in bytes from the
    mailbox's beginning."""

    def __init__(self, memory: torch.Tensor, half: int) -> None:
        assert memory.dtype is torch.uint8 and memory.numel() >= mailbox_bytes(half), (memory.shape, half)
        self._bytes = memory
        self._half_bytes = _aligned(half)
        self._half, self._used = 0, 0

    @property
    def tokens(self) -> int:
        """Where the current half's tokens begin."""
        return kernel.FLAG_BYTES + self._half * ALIGNMENT

    @property
    def slots(self) -> int:
        """Where the current half's slots begin."""
        return SLOTS_AT + self._half * kernel.MAX_RANKS * SLOT_BYTES

    @property
    def start(self) -> int:
        """Where the current half begins."""
        return HALVES_AT + self._half * self._half_bytes

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next free piece of the current half."""
        begin, num_bytes = self.start + self._used, math.prod(shape) * dtype.itemsize
        self._used += _aligned(num_bytes)
        assert self._used <= self._half_bytes, (tuple(shape), dtype, self._half_bytes)
        return self._bytes[begin : begin + num_bytes].view(dtype).view(tuple(shape))

    def place(self, x: torch.Tensor) -> int:
        """Where x begins, which must be a piece of the current half."""
        assert x.is_contiguous(), x.stride()
        if x.numel() == 0:
            return self.start
        begin = x.data_ptr() - self._bytes.data_ptr()
        inside = self.start <= begin and begin + x.nbytes <= self.start + self._half_bytes
        assert inside, "not a buffer of this half: buffers are for the next call that meets the others"
        return begin

    def turn(self) -> None:
        """Makes the other half, all of it, the current one."""
        self._half, self._used = 1 - self._half, 0

    def reset(self) -> None:
        """Makes half 0, all of it, the current one."""
        self._half, self._used = 0, 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
