"""Ranks on a CPU that run steps as GPUs do: the same program, arrays, padding and hand-over of results, with the plain
torch form of each kernel and collectives instead of mapped memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from splash_engines.kernels import Kernels
from splash_engines.kernels_reference import REFERENCE
from splash_plugins.mla_attention.prefill_kernel import tiles_of
from splash_plugins.shard_sample import reference as shard_sample
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.memory.arena import Arena
from splash_trt.memory.map import memory_map
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.device_clock import HostClock
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.runtime.peers import CollectivePeers
from splash_trt.weights.source import WeightSource

MakeMover = Callable[[World, ModelConfig, EngineConfig, Arena], PeerMover]
MakeKernels = Callable[[World, ModelConfig, EngineConfig], Kernels]


@contextmanager
def device_ranks(
    decode_sizes: Sequence[int] = (), make_mover: MakeMover | None = None, make_kernels: MakeKernels | None = None
) -> Iterator[None]:
    """All workers that start in it. decode_sizes: what those that only decode are padded to. make_mover: of ranks
    that write into each other's memory. make_kernels: of ranks with others than the plain ones."""

    def make(
        world: World, model: ModelConfig, config: EngineConfig, source: WeightSource, tokenizer: Path | None
    ) -> DeviceRunner:
        arena = Arena(memory_map(model, config, world.rank))
        return DeviceRunner(
            model,
            config,
            world.collectives,
            world.watch,
            source,
            tokenizer,
            arena=arena,
            kernels=REFERENCE if make_kernels is None else make_kernels(world, model, config),
            sample=shard_sample,
            peers=CollectivePeers(world.collectives),
            tiles=tiles_of,
            clock=HostClock(),
            decode_sizes=decode_sizes,
            capture=False,
            mover=None if make_mover is None else make_mover(world, model, config, arena),
        )

    with patch("splash_trt.worker.make_runner", make):
        yield
