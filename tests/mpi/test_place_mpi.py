"""Which GPU a rank of mpirun gets, and that all ranks come to the same."""

from __future__ import annotations

import pytest
import torch

from splash_trt.dist.world import World
from tests.mpi.world import Ranks

pytestmark = pytest.mark.mpi


def device(world: World, run_on: str, counts: list[int], ranks_a_node: int) -> str:
    """What a rank computes on, if it sees counts[rank] GPUs and nodes have so many ranks; or the refusal."""
    from mpi4py import MPI  # importing it at the top would make a rank of the test process

    from splash_trt.dist.world_mpi import rank_device

    node = MPI.COMM_WORLD.Split(world.rank // ranks_a_node)
    real, torch.cuda.device_count = torch.cuda.device_count, lambda: counts[world.rank]
    try:
        place, sharing = rank_device(MPI.COMM_WORLD, node, run_on)
        return f"{place} of {sharing}" if sharing > 1 else str(place)
    except ValueError as error:
        return str(error)
    finally:
        torch.cuda.device_count = real
        node.Free()


def test_a_rank_gets_the_gpu_of_its_number_on_the_node(mpi4: Ranks) -> None:
    for wish in ("gpu", "auto"):
        assert mpi4.run(device, wish, [4] * 4, 4) == [f"cuda:{i}" for i in range(4)]
        assert mpi4.run(device, wish, [2, 2, 3, 3], 2) == ["cuda:0", "cuda:1"] * 2


def test_all_ranks_come_to_the_same(mpi4: Ranks) -> None:
    assert mpi4.run(device, "auto", [2, 2, 1, 1], 2) == ["cpu"] * 4
    assert mpi4.run(device, "cpu", [4] * 4, 4) == ["cpu"] * 4


def test_ranks_that_share_begin_anew_where_gpus_end(mpi4: Ranks) -> None:
    assert mpi4.run(device, "shared-gpu", [1] * 4, 4) == ["cuda:0 of 4"] * 4
    assert mpi4.run(device, "shared-gpu", [2, 2, 1, 1], 2) == [f"cuda:{i} of 2" for i in (0, 1, 0, 0)]
    assert mpi4.run(device, "shared-gpu", [3] * 4, 4) == [f"cuda:{i} of 2" for i in (0, 1, 2, 0)]
    assert mpi4.run(device, "shared-gpu", [4] * 4, 4) == [f"cuda:{i}" for i in range(4)]
    # Three ranks on a node and one on another: what counts is the number on the node, and the node that shares most.
    assert mpi4.run(device, "shared-gpu", [2] * 4, 3) == [f"cuda:{i} of 2" for i in (0, 1, 0, 0)]
    assert mpi4.run(device, "shared-gpu", [1, 1, 1, 2], 3) == ["cuda:0 of 3"] * 4
    said = mpi4.run(device, "shared-gpu", [1, 1, 0, 0], 2)
    assert all("shared-gpu needs a GPU, and another node has none" in text for text in said[:2])
    assert all("shared-gpu needs a GPU, and this node has none" in text for text in said[2:])


def test_a_node_with_too_few_is_named_by_its_ranks(mpi4: Ranks) -> None:
    said = mpi4.run(device, "gpu", [2, 2, 1, 1], 2)
    assert all("another node has too few" in text for text in said[:2])
    assert all("this node has 1 that its 2 ranks may use" in text for text in said[2:])
