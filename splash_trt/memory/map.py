"""How one rank's arena is divided, and so how many pages it holds. Arithmetic only: the server, `splash-trt capacity`
and the simulator all use this code.

    0            own_offset      pages_offset           others_offset    memory_bytes
    | workspace  | own weights   | page 0 | page 1 |  …  | …  | page n |  |
                                                         [ other heads    ]

The top `others_bytes` hold pages while residency is SHARD, and the other ranks' heads while it is FULL.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from splash_trt.config import EngineConfig, Formats, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency
from splash_trt.migration.diff import Sizes
from splash_trt.models.config import ModelConfig
from splash_trt.weights.formats import head_itemsize, row_bytes
from splash_trt.weights.shards import align, heads_of, others_block, own_block
from splash_trt.weights.spec import Cut, tensor_specs


@dataclass(frozen=True, kw_only=True)
class MemoryMap:
    """Sizes in bytes of one rank's arena."""

    memory_bytes: int
    workspace_bytes: int
    own_bytes: int
    others_bytes: int
    page_bytes: int

    @property
    def own_offset(self) -> int:
        return self.workspace_bytes

    @property
    def pages_offset(self) -> int:
        return self.workspace_bytes + self.own_bytes

    @property
    def others_offset(self) -> int:
        """Where the other ranks' heads begin: as high as alignment allows."""
        return (self.memory_bytes - self.others_bytes) // 256 * 256

    def num_pages(self, residency: Residency) -> int:
        """Pages that fit; negative if not even the weights do."""
        end = self.memory_bytes if residency is Residency.SHARD else self.others_offset
        return (end - self.pages_offset) // self.page_bytes


def context_workspace_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of expanded attention's workspace: a block of context rows, and their keys and values for all heads."""
    expanded = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim)
    block = config.context_block * config.itemsize
    return align(block * model.row_width) + align(block * expanded)


def page_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of a page: the cache rows of page_tokens tokens in all layers."""
    return model.num_layers * config.page_tokens * row_bytes(model, config)


@functools.lru_cache(maxsize=4096)
def _weight_bytes(
    model: ModelConfig, rank: int, num_ranks: int, dtype: str, formats: Formats, experts_cut: str
) -> tuple[int, int]:
    """Bytes of the `own` and the `others` block. Cached: it lays out the tensors of all layers, and every call of
    memory_map needs it."""
    own = own_block(model, rank, num_ranks, dtype, formats, experts_cut)
    return own.num_bytes, others_block(model, rank, num_ranks, dtype, formats).num_bytes


def memory_map(model: ModelConfig, config: EngineConfig, rank: int) -> MemoryMap:
    own_bytes, others_bytes = _weight_bytes(
        model, rank, config.num_ranks, config.dtype, config.formats, config.experts_cut
    )
    return MemoryMap(
        memory_bytes=config.memory_bytes,
        workspace_bytes=context_workspace_bytes(model, config),
        own_bytes=own_bytes,
        others_bytes=others_bytes,
        page_bytes=page_bytes(model, config),
    )


def model_sizes(model: ModelConfig, config: EngineConfig) -> Sizes:
    """The sizes that migration computes with. Raises ValueError as `capacity` does, for any allowed layout."""
    pages = {
        SPECS[layout].residency: capacity(model, config, layout).pages_per_rank for layout in config.allowed_layouts
    }
    head_cut = [spec for spec in tensor_specs(model) if spec.cut is Cut.HEADS]
    return Sizes(
        page_tokens=config.page_tokens,
        row_bytes=model.num_layers * row_bytes(model, config),
        itemsize=head_itemsize(config),
        heads=heads_of(model, config.num_ranks),
        head_numbers=tuple(math.prod(spec.shape[1:]) for spec in head_cut),
        pages=pages,
    )


def request_tokens(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of the longest request, prompt and output together, that fits in every allowed layout."""
    return min(capacity(model, config, layout).request_tokens for layout in config.allowed_layouts)


DEFAULT_CACHE_BYTES = 512 << 20


def default_memory_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """The arena's size if none is given: room for all heads on every rank, and for DEFAULT_CACHE_BYTES of cache."""
    maps = [memory_map(model, config, rank) for rank in range(config.num_ranks)]
    return max(m.workspace_bytes + m.own_bytes + m.others_bytes for m in maps) + DEFAULT_CACHE_BYTES


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What one layout's cache holds, per rank and in total."""

    pages_per_rank: tuple[int, ...]
    page_tokens: int
    placement: PlacementKind

    @property
    def total_pages(self) -> int:
        """Pages that all ranks hold together, where a page that every rank has a copy of counts once."""
        pages = self.pages_per_rank
        return min(pages) if self.placement is PlacementKind.REPLICATED else sum(pages)

    @property
    def total_tokens(self) -> int:
        return self.total_pages * self.page_tokens

    @property
    def request_pages(self) -> int:
        """Pages of the longest request that fits alone, with the best owner or home."""
        if self.placement is PlacementKind.REPLICATED:
            return min(self.pages_per_rank)
        if self.placement is PlacementKind.OWNED:
            return max(self.pages_per_rank)
        return max(_longest_stripe(self.pages_per_rank, home) for home in range(len(self.pages_per_rank)))

    @property
    def request_tokens(self) -> int:
        return self.request_pages * self.page_tokens


def _longest_stripe(pages: tuple[int, ...], home: int) -> int:
    """Pages that a striped request with this home can have. Rank home + d holds its pages d, d + N, d + 2N, …"""
    ranks = len(pages)
    return min(pages[(home + d) % ranks] * ranks + d for d in range(ranks))


def capacity(model: ModelConfig, config: EngineConfig, layout: Layout) -> Capacity:
    """What `layout`'s cache holds. Raises ValueError, naming rank and shortfall, if weights leave no room for a page.
    """
    spec = SPECS[layout]
    pages = []
    for rank in range(config.num_ranks):
        sizes = memory_map(model, config, rank)
        count = sizes.num_pages(spec.residency)
        if count < 1:
            full = spec.residency is Residency.FULL
            weights = sizes.own_bytes + (sizes.others_bytes if full else 0)
            page = align(sizes.page_bytes) if full else sizes.page_bytes  # `others` begins aligned
            need = sizes.workspace_bytes + weights + page
            raise ValueError(
                f"memory_bytes: {config.memory_bytes} is too small for layout {layout.name.lower()} on rank {rank}: "
                f"workspace {sizes.workspace_bytes} + weights {weights} + one page {page} need {need}, "
                f"{need - config.memory_bytes} more"
            )
        pages.append(count)
    return Capacity(pages_per_rank=tuple(pages), page_tokens=config.page_tokens, placement=spec.placement)
