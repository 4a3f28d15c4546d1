"""Ranks of one process that write into each other's plain memory, in place of GPUs that map each other's."""

from __future__ import annotations

import random

import numpy as np
import torch

from splash_plugins.piece_copy.reference import piece_copy
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.memory.arena import Arena
from splash_trt.memory.map import memory_map
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.migration.pieces import Places, split
from splash_trt.models.config import ModelConfig


class HostCarrier:
    """A `Carrier` whose copies beside the step come as early or as late as they may, by chance."""

    def __init__(self, unit: int, seed: int) -> None:
        self._unit = unit
        self._random = random.Random(seed)
        self._waiting: list[np.ndarray] = []

    def now(self, pieces: np.ndarray) -> None:
        assert pieces.dtype == np.int64 and (pieces[:, 2] > 0).all()
        large, small = split(pieces, 64, 4, self._unit)
        piece_copy(torch.from_numpy(large), 1, 1)
        piece_copy(torch.from_numpy(small), self._unit, 1)

    def beside(self, pieces: np.ndarray) -> None:
        early = np.array([self._random.random() < 0.5 for _ in pieces], np.bool_)
        self.now(pieces[early])
        self._waiting.append(pieces[~early])

    def join(self) -> None:
        for pieces in self._waiting:
            self.now(pieces)
        self._waiting.clear()


def meet(world: World) -> None:
    """Returns when every rank is here."""
    world.collectives.all_gather(torch.zeros(1), [1] * world.size)


def peer_mover(world: World, model: ModelConfig, config: EngineConfig, arena: Arena, seed: int = 7) -> PeerMover:
    """Collective. arena: this rank's."""
    mine = torch.tensor([arena.view(0, (1,), torch.uint8).data_ptr()])
    bases = world.collectives.all_gather(mine, [1] * world.size).tolist()
    maps = [memory_map(model, config, rank) for rank in range(world.size)]
    places = Places(model, config.dtype, config.experts_cut, config.page_tokens, maps, bases)
    return PeerMover(world.rank, places, HostCarrier(places.unit, seed + world.rank), lambda: meet(world))
