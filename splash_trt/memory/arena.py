"""The arena: one range of bytes per rank that holds workspace, weights and cache pages, at addresses that never change.
"""

from __future__ import annotations

import math

import torch

from splash_trt.layout.spec import Residency
from splash_trt.memory.map import MemoryMap
from splash_trt.models.config import ModelConfig
from splash_trt.weights.shards import align

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Arena:
    """One rank's arena, divided as its MemoryMap says."""

    def __init__(self, sizes: MemoryMap, memory: torch.Tensor | None = None) -> None:
        """memory: uint8, zeros, at least sizes.memory_bytes; None allocates CPU memory, and raises ValueError if the
        system does not give that much."""
        self.sizes = sizes
        if memory is None:
            try:
                memory = torch.zeros(sizes.memory_bytes, dtype=torch.uint8)
            except RuntimeError as error:
                lacking = f"the system does not give a rank {sizes.memory_bytes} bytes"
                raise ValueError(f"memory_bytes: {lacking}; ask for less, or end what else uses memory") from error
        assert memory.dtype is torch.uint8 and memory.numel() >= sizes.memory_bytes, (memory.dtype, memory.shape)
        self._bytes = memory[: sizes.memory_bytes]

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the arena's bytes from `offset` on, a multiple of dtype's size."""
        end = offset + math.prod(shape) * dtype.itemsize
        assert 0 <= offset and end <= self.sizes.memory_bytes, (offset, shape, dtype)
        return self._bytes[offset:end].view(dtype).view(shape)

    def pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """[num pages under SHARD, *shape]: all pages that there can be. The last ones are in the bytes of the other
        ranks' heads, and hold cache rows only while those are not there."""
        count = self.sizes.num_pages(Residency.SHARD)
        return self.view(self.sizes.pages_offset, (count, *shape), dtype)

    def context_workspace(
        self, model: ModelConfig, block: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The workspace of expanded attention, as memory/map.py counts it: `block` context rows [block, W], and a flat
        tensor for their keys and values of all heads."""
        rows = self.view(0, (block, model.row_width), dtype)
        numbers = block * model.num_heads * (model.qk_nope_head_dim + model.v_head_dim)
        return rows, self.view(align(rows.nbytes), (numbers,), dtype)
