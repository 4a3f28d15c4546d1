"""The peers' kernels between processes of this machine."""

from __future__ import annotations

import pytest

from tests.mpi import mapped_peer_cases, peer_cases
from tests.mpi.world import Ranks

pytestmark = [pytest.mark.mpi, pytest.mark.kernels]
NAMES = [case.__name__ for case in peer_cases.CASES]


def test_float32_between_two(mpi2: Ranks) -> None:
    assert mpi2.run(mapped_peer_cases.run_all, "float32", NAMES, timeout_s=240) == [NAMES] * 2


def test_sums_of_pairs_between_two(mpi2: Ranks) -> None:
    compared = mpi2.run(mapped_peer_cases.run_pairs, "float32", timeout_s=240)
    assert compared[0] > 20 and compared == [compared[0]] * 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sums_of_pairs_among_four(mpi4: Ranks) -> None:
    compared = mpi4.run(mapped_peer_cases.run_pairs, "float32", timeout_s=800)
    assert compared[0] > 20 and compared == [compared[0]] * 4


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_float64_among_four(mpi4: Ranks) -> None:
    assert mpi4.run(mapped_peer_cases.run_all, "float64", NAMES, timeout_s=800) == [NAMES] * 4
