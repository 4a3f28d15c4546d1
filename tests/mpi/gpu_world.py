"""A world of MPI ranks that was made without GPUs, on GPUs: one for each rank, or as many ranks on one as it takes."""

from __future__ import annotations

from dataclasses import replace

import torch

from splash_trt.dist.collectives import Collectives
from splash_trt.dist.world import World


def device_of(world: World) -> torch.device:
    """Ranks begin anew where GPUs end, as with `--run-on shared-gpu`."""
    return torch.device("cuda", world.rank % torch.cuda.device_count())


def on_gpus(world: World) -> World:
    """Collective. Its collectives have a `close`, which is collective too."""
    # These make a rank of the process that imports them.
    from mpi4py import MPI

    from splash_trt.dist.collectives_nccl import NcclCollectives
    from splash_trt.dist.collectives_staged import StagedCollectives

    device, sharing = device_of(world), -(-world.size // torch.cuda.device_count())
    collectives: Collectives
    if sharing == 1:
        collectives = NcclCollectives(MPI.COMM_WORLD, world.watch, device, deadline_s=60.0)
    else:
        collectives = StagedCollectives(MPI.COMM_WORLD, world.watch, device)
    return replace(world, collectives=collectives, device=device, ranks_on_device=sharing)
