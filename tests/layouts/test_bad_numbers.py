"""A request with numbers that are NaN, or infinite after an overflow, does no harm to other requests: neither to those
in its steps, nor to those that get its pages, its slot or its place in workspaces after it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from splash_engines.kernels_reference import REFERENCE
from splash_trt.config import Layout
from splash_trt.request import Request
from tests.device_ranks import device_ranks
from tests.switching.harness import Server, Told, assert_same, make_requests, never_switched, write_model

BAD_ID = 77


def spoiled(bad: float) -> Any:
    """The table of kernels of a model in which the hidden state of BAD_ID is `bad`."""

    def embed(ids: torch.Tensor, slot: torch.Tensor, *rest: Any) -> None:
        REFERENCE.embed(ids, slot, *rest)
        rest[-1][ids == BAD_ID] = bad

    return dataclasses.replace(REFERENCE, embed=embed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good() -> list[Request]:
    return [request for request in make_requests(14, max_tokens=8) if BAD_ID not in request.prompt]


@pytest.fixture(scope="module")
def expected(folder: Path, good: list[Request]) -> dict[str, Told]:
    return never_switched(folder, good)


@pytest.mark.parametrize("sizes", [(), (2, 4, 7, 16)])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_others_are_told_the_same(
    folder: Path, good: list[Request], expected: dict[str, Told], bad: float, layout: Layout, sizes: tuple[int, ...]
) -> None:
    with patch("splash_trt.runtime.cpu_runner.REFERENCE", spoiled(bad)), device_ranks(sizes):
        with Server(folder, ranks=2, layout=layout, pages=30, absorbed_tokens=3, dop_absorbed_tokens=3) as server:
            for i, request in enumerate(good):
                prompt = tuple(BAD_ID if k % 3 == 0 else k for k in range(5 * i + 1))
                server.add(Request(id=f"bad{i}", prompt=prompt, sampling=request.sampling), request)
            server.run()
    assert len(good) > 8
    assert_same({request.id: server.told[request.id] for request in good}, expected)
    assert any(told.logprobs and told.logprobs[0] != told.logprobs[0] for told in server.told.values()), "none was bad"
