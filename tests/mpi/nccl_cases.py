"""The collectives of torch.distributed; run on all ranks of a world under mpirun."""

from __future__ import annotations

import torch

from splash_trt.dist.world import World
from tests.mpi import collective_cases


def run_all(world: World, backend: str) -> int:
    """Every case of collective_cases over `backend`, on GPUs if that is "nccl"; how many there were."""
    # These make a rank of the process that imports them, which the test process must not become.
    from mpi4py import MPI

    from splash_trt.dist.collectives_nccl import NcclCollectives

    device = torch.device("cuda", world.rank) if backend == "nccl" else torch.device("cpu")
    collectives = NcclCollectives(MPI.COMM_WORLD, world.watch, device, deadline_s=60.0, backend=backend)
    for case in collective_cases.CASES:
        case(collectives, device)
    collective_cases.check_bytes_sent(collectives, collectives.bytes_sent, device)
    collectives.close()
    return len(collective_cases.CASES)
