"""Ranks on CPUs that run steps more as ranks on GPUs do: padded, with movers that write into each other's memory, and
with other kernels than the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from splash_engines.kernels import Kernels
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.memory.arena import Arena
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.cpu_runner import cpu_runner
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.weights.source import WeightSource

MakeMover = Callable[[World, ModelConfig, EngineConfig, Arena], PeerMover]
MakeKernels = Callable[[World, ModelConfig, EngineConfig], Kernels]


@contextmanager
def device_ranks(
    decode_sizes: Sequence[int] = (), make_mover: MakeMover | None = None, make_kernels: MakeKernels | None = None
) -> Iterator[None]:
    """All workers that start in it. decode_sizes: what those that only decode are padded to."""

    def make(
        world: World, model: ModelConfig, config: EngineConfig, source: WeightSource, tokenizer: Path | None
    ) -> DeviceRunner:
        kernels = make_kernels and make_kernels(world, model, config)
        return cpu_runner(
            world, model, config, source, tokenizer,
            kernels=kernels, decode_sizes=decode_sizes, make_mover=make_mover,
        )  # fmt: skip

    with patch("splash_trt.worker.make_runner", make):
        yield
