"""Puts a GPU rank's runner together: memory that the other ranks map, the kernels, and how ranks meet."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from mpi4py import MPI

from splash_engines.choose import choose_kernels
from splash_engines.kernels import Kernels
from splash_engines.kernels_cuda import CUDA
from splash_engines.kernels_reference import REFERENCE
from splash_engines.operations import this_machine
from splash_engines.operations_program import program_operations, program_sizes
from splash_engines.registry import Registry
from splash_plugins.clock.kernel import stamp
from splash_plugins.piece_copy.kernel import piece_copy
from splash_plugins.shard_sample import kernel as sample_kernel
from splash_plugins.shard_sample import reference as sample_reference
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.memory.arena import DTYPES, Arena
from splash_trt.memory.device_memory import DeviceMemory
from splash_trt.memory.map import memory_map
from splash_trt.migration.carrier import CudaCarrier
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.migration.pieces import Places
from splash_trt.models.config import ModelConfig
from splash_trt.observe.log import event
from splash_trt.runtime.device_clock import CudaClock
from splash_trt.runtime.device_runner import DeviceRunner, Parts
from splash_trt.runtime.mailbox import half_bytes
from splash_trt.runtime.peers import CollectivePeers, Peers
from splash_trt.runtime.peers_cuda import connect, reachable
from splash_trt.runtime.shapes import ladder
from splash_trt.weights.source import WeightSource

log = logging.getLogger(__name__)

MAX_GRAPHED = 1024
"""Hidden states of a rank up to which decoding is captured; above, launching costs less than the kernels take."""


def gpu_runner(
    world: World, model: ModelConfig, config: EngineConfig, source: WeightSource, tokenizer: Path | None
) -> DeviceRunner:
    """Collective over the ranks. Graphs are captured where all operations are kernels: not in float64, for which there
    are none, and not with ranks on several hosts, which meet through NCCL."""
    maps = [memory_map(model, config, rank) for rank in range(world.size)]
    memory = DeviceMemory(maps[world.rank].memory_bytes, world.device)
    near = reachable(MPI.COMM_WORLD, world.device)
    peers: Peers = CollectivePeers(world.collectives, world.device)
    mover = None
    if near:
        half = half_bytes(model, config.itemsize, _most_stacked(config), _most_absorbed(config))
        offsets = [sizes.pages_offset for sizes in maps]
        mapped, mailbox = connect(MPI.COMM_WORLD, world.device, half, memory, offsets, config.step_deadline_s)
        kinds = (config.dtype, config.experts_cut, config.page_tokens)
        places = Places(model, *kinds, maps, mapped.arena_addresses)
        carrier = CudaCarrier(world.device, places.unit, piece_copy)
        peers, mover = mapped, PeerMover(world.rank, places, carrier, mapped.begin)
    exact = config.dtype == "float64"
    decode_sizes = ladder(1, _most_graphed(config), 4)
    parts = Parts(
        arena=Arena(maps[world.rank], memory.bytes),
        kernels=REFERENCE if exact else _kernels(world, model, config, decode_sizes),
        sample=sample_reference if exact else sample_kernel,
        peers=peers,
        clock=CudaClock(stamp, world.device),
        decode_sizes=decode_sizes,
        capture=near and not exact,
        mover=mover,
    )
    runner = DeviceRunner(world, model, config, source, tokenizer, parts)
    if config.capture_ahead:
        runner.warm_up()
    torch.cuda.synchronize()
    return runner


def _kernels(world: World, model: ModelConfig, config: EngineConfig, decode_sizes: Sequence[int]) -> Kernels:
    """The same on all ranks, so that what they compute alike has the same bits; said in rank 0's log."""
    own = CUDA
    if config.experts_cut == "inside":
        own = dataclasses.replace(CUDA, grouped_experts=functools.partial(CUDA.grouped_experts, all_here=True))
    if config.operators == "own":
        return own
    operations = program_operations(this_machine(), own, model.experts)
    registry = Registry(operations, world.device, gather=MPI.COMM_WORLD.allgather)
    rows = sorted({size * ranks for size in decode_sizes for ranks in (1, world.size)})
    kernels, told = choose_kernels(own, registry, program_sizes(model), DTYPES[config.dtype], rows)
    if world.rank == 0:
        for used in told:
            event(log, logging.INFO, "operator", **dataclasses.asdict(used))
    return kernels


def _most_graphed(config: EngineConfig) -> int:
    """Hidden states of a rank in the largest captured step that only decodes."""
    return min(config.max_running, MAX_GRAPHED)


def _most_stacked(config: EngineConfig) -> int:
    return max(config.max_batch_tokens, config.num_ranks * _most_graphed(config))


def _most_absorbed(config: EngineConfig) -> int:
    """Rows of a step that attend absorbed."""
    chunk = max(config.most_absorbed(layout) for layout in config.allowed_layouts)
    graphed = config.num_ranks * _most_graphed(config)
    return max(graphed, min(config.max_batch_tokens, config.max_running * chunk))
