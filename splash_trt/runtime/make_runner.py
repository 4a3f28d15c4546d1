"""Makes a rank's runner, for a CPU or for a GPU."""

from __future__ import annotations

from pathlib import Path

from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.cpu_runner import cpu_runner
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.weights.source import WeightSource


def make_runner(
    world: World, model: ModelConfig, config: EngineConfig, source: WeightSource, tokenizer: Path | None
) -> DeviceRunner:
    """To be called on all ranks together."""
    if world.device.type == "cpu":
        return cpu_runner(world, model, config, source, tokenizer)
    from splash_trt.runtime.gpu_runner import gpu_runner  # triton and CUDA are there on GPUs only

    return gpu_runner(world, model, config, source, tokenizer)
