"""Which runner a rank gets: on a CPU the plain one, on a GPU one that launches steps and takes their results later."""

from __future__ import annotations

from pathlib import Path

from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.runtime.runner import Runner
from splash_trt.weights.source import WeightSource

AnyRunner = Runner | DeviceRunner


def make_runner(
    world: World, model: ModelConfig, config: EngineConfig, source: WeightSource, tokenizer: Path | None
) -> AnyRunner:
    """The runner of this rank; on all ranks together."""
    if world.device.type == "cpu":
        return Runner(model, config, world.collectives, world.watch, source, tokenizer)
    from splash_trt.runtime.gpu_runner import gpu_runner  # triton and CUDA are there on GPUs only

    return gpu_runner(world, model, config, source, tokenizer)
