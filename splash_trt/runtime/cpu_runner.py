"""Puts a CPU rank's runner together: the same program as a GPU's, with the plain torch form of each kernel, and
collectives where GPUs read one another's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from splash_engines.kernels import Kernels
from splash_engines.kernels_reference import REFERENCE
from splash_plugins.shard_sample import reference as shard_sample
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.memory.arena import Arena
from splash_trt.memory.map import memory_map
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.device_clock import HostClock
from splash_trt.runtime.device_runner import DeviceRunner, Parts
from splash_trt.runtime.peers import CollectivePeers
from splash_trt.runtime.program import Program
from splash_trt.weights.source import WeightSource


def cpu_runner(
    world: World,
    model: ModelConfig,
    config: EngineConfig,
    source: WeightSource,
    tokenizer: Path | None,
    *,
    kernels: Kernels | None = None,
    decode_sizes: Sequence[int] = (),
    make_mover: Callable[[World, ModelConfig, EngineConfig, Arena], PeerMover] | None = None,
    program: Callable[..., Program] = Program,
) -> DeviceRunner:
    """kernels: others than the plain ones. decode_sizes, make_mover, program: see Parts; a CPU gains nothing from
    padding, and has no memory that others map."""
    arena = Arena(memory_map(model, config, world.rank))
    parts = Parts(
        arena=arena,
        kernels=kernels or REFERENCE,
        sample=shard_sample,
        peers=CollectivePeers(world.collectives),
        clock=HostClock(),
        decode_sizes=decode_sizes,
        capture=False,
        mover=make_mover and make_mover(world, model, config, arena),
        program=program,
    )
    return DeviceRunner(world, model, config, source, tokenizer, parts)
