"""What ranks pass to each other inside a step, between threads of one process, against results in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from splash_trt.dist.world import ThreadWorld
from splash_trt.runtime.peers import CollectivePeers
from tests.mpi import peer_cases


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", peer_cases.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_case(case: Callable[..., None], size: int, dtype: str) -> None:
    ThreadWorld(size).run(lambda world: case(CollectivePeers(world.collectives), peer_cases.Setting(dtype)))
