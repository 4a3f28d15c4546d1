"""What ranks compute on: processors, or one GPU for each rank, or GPUs that they share; how much of its memory is theirs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from splash_trt.config import RUN_ON_WISHES
from splash_trt.dist.world import World

MEMORY_SHARE = 0.85
"""Of a GPU's memory, for a rank's arena where nobody says how much. The rest is the CUDA context's and NCCL's, CUDA
graphs' and a step's activations."""
_MEMORY_UNIT = 2 << 20  # device memory comes in pieces of this
_CONTAINER_LIMITS = tuple(map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")))


def num_gpus() -> int:
    """That this process may use; 0 with a torch that knows none. Does not touch them."""
    return torch.cuda.device_count()


def choose(wish: str, ranks_here: int | None) -> str:
    """EngineConfig.run_on for one of RUN_ON_WISHES, as this node alone can tell; "auto" means GPUs where every rank has
    one, "shared-gpu" GPUs however few there are.

    ranks_here: ranks on this node, None if that is not known before they start. ValueError if they are to have GPUs
    and there are too few.
    """
    if wish not in RUN_ON_WISHES:
        raise ValueError(f"run_on: {wish!r} is not one of {', '.join(RUN_ON_WISHES)}")
    wanted = 1 if wish == "shared-gpu" else ranks_here or 1
    if wish == "cpu" or (wish == "auto" and num_gpus() < wanted):
        return "cpu"
    if num_gpus() < wanted:
        refuse(wish, ranks_here or 1)
    return "gpu"


def run_on_of(world: World) -> str:
    """EngineConfig.run_on for the ranks of a world."""
    return "gpu" if world.device.type == "cuda" else "cpu"


def refuse(wish: str, ranks_here: int) -> None:
    """Raises ValueError: this node's ranks cannot have GPUs as they wish."""
    if num_gpus() == 0:
        raise ValueError(f"run_on: {wish} needs a GPU, and this node has none that its ranks may use: say cpu")
    raise ValueError(
        f"run_on: gpu needs a GPU for each rank, and this node has {num_gpus()} that its {ranks_here} ranks may use "
        "(CUDA_VISIBLE_DEVICES counts): start fewer ranks here, or say cpu, or shared-gpu to try it slowly"
    )


def host_bytes(limits: Sequence[Path] = _CONTAINER_LIMITS) -> int:
    """This machine's memory, or what its container may have of it. limits: files that say the latter, if they exist."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        text = path.read_text().strip() if path.exists() else ""
        most = min(most, int(text)) if text.isdigit() else most
    return most


def refuse_too_much(memory_bytes: int, ranks_here: int) -> None:
    """ValueError for arenas of ranks on processors that this machine has no memory for."""
    most = host_bytes()
    if memory_bytes * ranks_here > most:
        each = f"{memory_bytes} bytes for each of {ranks_here} ranks" if ranks_here > 1 else f"{memory_bytes} bytes"
        fewer = ", or start fewer ranks here" if ranks_here > 1 else ""
        raise ValueError(
            f"memory_bytes: this machine has {most} bytes in all, not enough for {each}; give at most "
            f"{most // ranks_here}{fewer}"
        )


def gpu_name(world: World) -> str | None:
    """What the driver calls this rank's GPU; None: it computes on processors. Initialises CUDA, so it is for ranks."""
    return torch.cuda.get_device_name(world.device) if run_on_of(world) == "gpu" else None


def default_arena_bytes(world: World) -> int:
    """EngineConfig.memory_bytes for ranks on GPUs: a rank's part of MEMORY_SHARE of the smallest one's memory.
    Collective."""
    _, total = torch.cuda.mem_get_info(world.device)
    mine = torch.tensor([total // world.ranks_on_device], dtype=torch.int64, device=world.device)
    smallest = int(world.collectives.all_gather(mine, [1] * world.size).min())
    return int(smallest * MEMORY_SHARE) // _MEMORY_UNIT * _MEMORY_UNIT
