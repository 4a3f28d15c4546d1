"""Peers over mapped memory, one GPU per rank, or several ranks on one where there are fewer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from splash_trt.memory.device_memory import DeviceMemory
from tests.mpi import gpu_peer_cases
from tests.mpi.peer_cases import CASES
from tests.mpi.world import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


def test_device_memory_is_zeroed_and_what_is_written_stays() -> None:
    memory = DeviceMemory(3 << 20, torch.device("cuda", 0))
    assert memory.bytes.numel() == 3 << 20 and memory.num_bytes == 4 << 20
    assert memory.bytes.data_ptr() == memory.address and not memory.bytes.any()
    memory.bytes[1 << 20 :] = 7
    assert int(memory.bytes.long().sum()) == 7 * (2 << 20)
    memory.close()


def test_no_room_is_an_answer() -> None:
    with pytest.raises(ValueError, match=r"memory_bytes: cuda:0 has no room for 1099511627776 bytes more: \d+ of its"):
        DeviceMemory(1 << 40, torch.device("cuda", 0))


@pytest.fixture(params=[1, 2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def test_all_cases(ranks: Ranks) -> None:
    for dtype in ("bfloat16", "float32", "float64"):
        assert ranks.run(gpu_peer_cases.run_all, dtype, timeout_s=240) == [len(CASES)] * ranks.size


def test_sums_of_pairs(ranks: Ranks) -> None:
    for dtype in ("bfloat16", "float32"):
        compared = ranks.run(gpu_peer_cases.run_pairs, dtype, timeout_s=240)
        assert compared == [compared[0]] * ranks.size
        assert (compared[0] > 20) == (ranks.size > 1)


def test_captured_steps_among_other_calls(ranks: Ranks) -> None:
    assert ranks.run(gpu_peer_cases.run_replays, 1000, timeout_s=240) == [0] * ranks.size
