"""A step in which ranks sum a token's experts, and the output projection's parts, while they exchange them gives the
same as one in which they are summed before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from splash_engines.kernels_reference import REFERENCE
from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.pairs import PairSum
from splash_plugins.grouped_experts.reference import sum_of_experts
from splash_trt.config import Layout
from splash_trt.runtime.peers import CollectivePeers, Unsummed
from tests.device_ranks import device_ranks
from tests.switching.harness import Server, assert_same, make_requests, never_switched, write_model

MET: dict[type, int] = {}


def left_over(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    ready: Any = None,
    defer: bool = False,
) -> PairSum:
    """Leaves one pair a token, all of it; what was to be filled holds NaN."""
    assert defer
    y = torch.empty_like(out)
    sum_of_experts(x, choice, weight, gate_up, down, first_expert, addend, y, ready)
    out.fill_(torch.nan)
    one = torch.zeros((len(x), 1), dtype=torch.int32)
    return PairSum(y, one, torch.ones(one.shape), 0, 1, None, joined=ready is not None)


def in_parts(x: torch.Tensor, w: torch.Tensor) -> PartSum:
    """All of it, and then nothing."""
    whole = x @ w.t()
    return PartSum(torch.stack((whole, torch.zeros_like(whole)), dim=1))


class Summing(CollectivePeers):
    def takes_unsummed(self, partial: torch.Tensor) -> bool:
        return True

    def sum_rows(self, partial: torch.Tensor | Unsummed, *rest: Any) -> torch.Tensor | None:
        if isinstance(partial, PairSum):
            assert partial.joined
        if not isinstance(partial, torch.Tensor):
            MET[type(partial)] = MET.get(type(partial), 0) + 1
            partial = partial.y if isinstance(partial, PairSum) else partial.y.sum(1)
        return super().sum_rows(partial, *rest)


@pytest.mark.parametrize("layout", Layout)
def test_what_is_left_to_sum_goes_to_the_peers(tmp_path: Path, layout: Layout) -> None:
    folder, requests = write_model(tmp_path), make_requests(4)
    MET.clear()
    kernels = replace(REFERENCE, grouped_experts=left_over, linear_parts=in_parts)
    with (
        device_ranks((2, 4)),
        patch("splash_trt.runtime.cpu_runner.REFERENCE", kernels),
        patch("splash_trt.runtime.cpu_runner.CollectivePeers", Summing),
        Server(folder, ranks=2, layout=layout, pages=40) as server,
    ):
        server.add(*requests)
        server.run()
        got = server.told
    summed = layout in (Layout.TP, Layout.DOP)
    assert (PartSum in MET) == summed and MET[PairSum] > 0
    assert_same(got, never_switched(folder, requests))
