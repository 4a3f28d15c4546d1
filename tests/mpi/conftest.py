"""Worlds of MPI ranks, one per size and session. See world.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mpi.world import Ranks


@pytest.fixture(scope="session")
def mpi2() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def mpi4() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
