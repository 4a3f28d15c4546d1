"""A plan's moves and weights as pieces of memory: which bytes go from which address to which. Arithmetic only.

Pieces are [n, 3] int64: source address, target address, bytes. N ranks; addresses are those at which one rank sees the
arenas of all (memory/map.py says how an arena is divided, weights/shards.py how its two blocks of weights are).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from splash_trt.memory.map import MemoryMap
from splash_trt.models.config import ModelConfig
from splash_trt.weights.shards import Block, heads_of, others_begin, others_block, own_block
from splash_trt.weights.spec import Cut

WIDEST_UNIT = 16  # bytes


class Places:
    """Where cache rows and heads lie. maps, bases [N]: how each rank's arena is divided, and where it begins.

    dtype, experts_cut, page_tokens: as in EngineConfig.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: str,
        experts_cut: str,
        page_tokens: int,
        maps: Sequence[MemoryMap],
        bases: Sequence[int],
    ) -> None:
        ranks = range(len(maps))
        self._num_layers = model.num_layers
        self._page_tokens = page_tokens
        self._page_bytes = maps[0].page_bytes
        self._layer_bytes = self._page_bytes // model.num_layers
        self._row_bytes = self._layer_bytes // page_tokens
        assert self._row_bytes * page_tokens * model.num_layers == self._page_bytes, "rows have the same size"
        self._pages = np.array([base + sizes.pages_offset for base, sizes in zip(bases, maps, strict=True)], np.int64)
        own = [_head_cut(own_block(model, rank, len(maps), dtype, experts_cut=experts_cut)) for rank in ranks]
        others = [others_block(model, rank, len(maps), dtype) for rank in ranks]
        self._itemsize = np.array([shard.itemsize for shard in others[0].shards], np.int64)
        heads = heads_of(model, len(maps))
        self._own = np.array(
            [[bases[r] + maps[r].own_offset + offset for offset in own[r]] for r in ranks], np.int64
        ).reshape(len(maps), -1)
        self._others = np.zeros((len(maps), *self._own.shape), np.int64)  # [target, source, tensor]
        for target in ranks:
            begin = bases[target] + maps[target].others_offset
            for tensor, shard in enumerate(others[target].shards):
                numbers = math.prod(shard.shape[1:])
                for source in ranks:
                    first = others_begin(heads, source, target, numbers) * shard.itemsize
                    self._others[target, source, tensor] = begin + shard.offset + first

    @property
    def unit(self) -> int:
        """Bytes, a power of two up to WIDEST_UNIT, that divide every address and length of rows."""
        return math.gcd(WIDEST_UNIT, *self._pages.tolist(), self._page_bytes, self._row_bytes)

    def row_bytes(self, moves: np.ndarray) -> int:
        """Of all that `moves` [M, 6], as in a plan, name."""
        return int(moves[:, 5].sum()) * self._row_bytes * self._num_layers

    def rows(self, moves: np.ndarray) -> np.ndarray:
        """The pieces of `moves`: a full page is one, other rows are one a layer."""
        source, target, first, count = self._page(moves, 0), self._page(moves, 2), moves[:, 4], moves[:, 5]
        full = count == self._page_tokens
        pages = np.stack((source[full], target[full], np.full(int(full.sum()), self._page_bytes)), axis=1)
        at = np.arange(self._num_layers) * self._layer_bytes + first[~full, None].astype(np.int64) * self._row_bytes
        num_bytes = np.broadcast_to(count[~full, None].astype(np.int64) * self._row_bytes, at.shape)
        parts = np.stack((source[~full, None] + at, target[~full, None] + at, num_bytes), axis=2)
        return np.concatenate((pages, parts.reshape(-1, 3)))

    def heads(self, weights: np.ndarray) -> np.ndarray:
        """The pieces of a plan's `weights` [K, 5]."""
        source, target, tensor, begin, end = weights.T
        size = self._itemsize[tensor]
        there = self._others[target, source, tensor]
        return np.stack((self._own[source, tensor] + begin * size, there + begin * size, (end - begin) * size), axis=1)

    def _page(self, moves: np.ndarray, column: int) -> np.ndarray:
        """[M] int64: where the pages that these two columns name begin."""
        return self._pages[moves[:, column]] + moves[:, column + 1].astype(np.int64) * self._page_bytes


def merged(pieces: np.ndarray) -> np.ndarray:
    """The same bytes in as few pieces as can be; no two pieces of `pieces` may write the same byte."""
    pieces = pieces[pieces[:, 2] > 0]
    if len(pieces) < 2:
        return pieces
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    follows = (pieces[:-1, :2] + pieces[:-1, 2:] == pieces[1:, :2]).all(axis=1)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return np.concatenate((pieces[first, :2], np.add.reduceat(pieces[:, 2:], first)), axis=1)


def split(pieces: np.ndarray, least_bytes: int, most: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """(large, small): large are those of at least least_bytes, `most` at most, and any that `unit` does not divide."""
    large = pieces[:, 2] >= max(least_bytes, -(-int(pieces[:, 2].sum()) // most))
    large |= (pieces % unit).any(axis=1)
    return pieces[large], pieces[~large]


def _head_cut(block: Block) -> list[int]:
    """Where a block's head-cut tensors begin, in the model's order."""
    return [shard.offset for shard in block.shards if shard.spec.cut is Cut.HEADS]
