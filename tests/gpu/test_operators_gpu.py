"""The operators among which a GPU's program chooses, on that GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from splash_engines.choose import choose_kernels
from splash_engines.inspect_operations import DEEPSEEK_EXPERTS
from splash_engines.kernels_cuda import CUDA
from splash_engines.operations import DSV3_A_OUT, DSV3_EXPERTS, DSV3_HIDDEN, this_machine
from splash_engines.operations_program import own, program_operations
from splash_engines.registry import Candidate, Registry
from splash_plugins.router import kernel as router

pytestmark = pytest.mark.gpu

SIZES = {
    "project_in": {"hidden": DSV3_HIDDEN, "out": DSV3_A_OUT},
    "route": {"hidden": DSV3_HIDDEN, "experts": DSV3_EXPERTS},
}
ROWS = (1, 3, 8, 16, 20)


def test_what_is_chosen_at_deepseeks_sizes_is_right() -> None:
    """TensorRT-LLM's operators are right where they are there, and so is our own beside them."""
    registry = Registry(program_operations(this_machine(), CUDA, DEEPSEEK_EXPERTS), torch.device("cuda", 0))
    kernels, told = choose_kernels(CUDA, registry, SIZES, torch.bfloat16, ROWS)
    assert {used.operation for used in told} == set(SIZES)
    assert not any("wrong" in used.why for used in told), told
    x = torch.randn((3, DSV3_HIDDEN), device="cuda", dtype=torch.bfloat16)
    w = torch.randn((DSV3_A_OUT, DSV3_HIDDEN), device="cuda", dtype=torch.bfloat16) / 85
    graph = torch.cuda.CUDAGraph()
    kernels.project_in(x, w)
    with torch.cuda.graph(graph):
        out = kernels.project_in(x, w)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, x @ w.t(), rtol=2e-2, atol=2e-2)


def test_our_own_is_right_and_takes_time() -> None:
    """Against a rival that is there on every GPU: logits by torch, then our choice."""

    def from_logits(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> None:
        router.choose(torch.mm(x.float(), weight.float().t()), *rest)

    rival = Candidate(name="rival", load=lambda: from_logits)
    made = program_operations(this_machine(), CUDA, DEEPSEEK_EXPERTS)[1]
    made = dataclasses.replace(made, candidates=(own(CUDA.route), rival))
    choice = Registry([made], torch.device("cuda", 0)).choose("route", {"tokens": 5, **SIZES["route"]}, torch.bfloat16)
    assert all(finding.microseconds is not None and finding.microseconds > 0.5 for finding in choice.findings)
