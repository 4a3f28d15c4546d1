"""One rank's weights in its arena: `own` always, `others` (the other ranks' heads) while residency is FULL."""

from __future__ import annotations

import torch

from splash_trt.layout.spec import Residency
from splash_trt.memory.arena import DTYPES, Arena
from splash_trt.models.config import ModelConfig
from splash_trt.weights.shards import Block, heads_of, others_begin, others_block, own_block
from splash_trt.weights.source import WeightSource


class WeightStore:
    """Named tensors over the arena's bytes.

    `own[name]` has the rank's part of the tensor. `others[name]` has the other ranks' parts of a head-cut tensor, but
    only while `residency` is FULL: otherwise its bytes are cache pages.
    """

    def __init__(
        self, arena: Arena, model: ModelConfig, rank: int, num_ranks: int, dtype: str, experts_cut: str
    ) -> None:
        """dtype, experts_cut: as in the EngineConfig that the arena was made for."""
        self._dtype = DTYPES[dtype]
        self._own_block = own_block(model, rank, num_ranks, dtype, experts_cut=experts_cut)
        self._others_block = others_block(model, rank, num_ranks, dtype)
        self.own = self._views(arena, self._own_block, arena.sizes.own_offset)
        fits = arena.sizes.num_pages(Residency.FULL) > 0  # if not, no layout of this deployment has FULL residency
        self.others = self._views(arena, self._others_block, arena.sizes.others_offset) if fits else {}
        self.residency = Residency.SHARD
        self._rank = rank
        self._heads = heads_of(model, num_ranks)
        self._head_cut = [s.spec.name for s in self._others_block.shards]

    def _views(self, arena: Arena, block: Block, base: int) -> dict[str, torch.Tensor]:
        wide = self._dtype if self._dtype.itemsize >= 4 else torch.float32
        return {
            s.spec.name: arena.view(base + s.offset, s.shape, wide if s.spec.float32 else self._dtype)
            for s in block.shards
        }

    def own_part(self, tensor: int, begin: int, end: int) -> torch.Tensor:
        """Numbers [begin, end) of this rank's part of head-cut tensor number `tensor`, a flat view."""
        return self.own[self._head_cut[tensor]].view(-1)[begin:end]

    def others_part(self, source: int, tensor: int, begin: int, end: int) -> torch.Tensor:
        """Numbers [begin, end) of rank `source`'s part of head-cut tensor number `tensor`, a flat view of `others`."""
        others = self.others[self._head_cut[tensor]]
        first = others_begin(self._heads, source, self._rank, others[0].numel())
        return others.view(-1)[first + begin : first + end]

    def load_own(self, source: WeightSource) -> None:
        _read(source, self._own_block, self.own)

    def load_others(self, source: WeightSource) -> None:
        """Read the other ranks' heads from the source; no page that is in use may be in their place."""
        _read(source, self._others_block, self.others)
        self.residency = Residency.FULL


def _read(source: WeightSource, block: Block, tensors: dict[str, torch.Tensor]) -> None:
    for shard in block.shards:
        position = 0
        for begin, end in shard.parts:
            out = tensors[shard.spec.name].narrow(shard.spec.axis, position, end - begin)
            if end > begin:
                source.read(shard.spec, begin, end, out)
            position += end - begin
