"""The operations of a step's program (splash_trt/runtime/program.py) for which there are others' kernels at some sizes.

They have the names and signatures of the `Kernels` table. Our own kernel is a candidate for each, and is used without a
test at sizes that no other is made for. T tokens, D hidden, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from splash_engines.kernels import Kernels
from splash_engines.operations import Here, fused_a, random_of, router_product, weight_of, wrapped
from splash_engines.registry import Candidate, Case, Dims, Function, Operation, relative_error
from splash_plugins.router import reference
from splash_trt.models.config import Experts, ModelConfig

OWN = "own"
NEAR = 1e-3  # tests take only tokens whose choice survives relative changes of the router of this size


def program_operations(here: Here, kernels: Kernels, experts: Experts | None) -> tuple[Operation, ...]:
    """kernels: our own. experts: None for a model without such layers."""
    return (project_in(here, kernels), *(() if experts is None else (route(here, kernels, experts),)))


def program_sizes(model: ModelConfig) -> dict[str, Dims]:
    """Each operation's sizes in this model, without the number of tokens."""
    out = (model.q_lora_rank or 0) + model.row_width
    sizes: dict[str, Dims] = {"project_in": {"hidden": model.hidden_size, "out": out}}
    if model.experts is not None:
        sizes["route"] = {"hidden": model.hidden_size, "experts": model.experts.num_experts}
    return sizes


def own(function: Function) -> Candidate:
    return Candidate(name=OWN, load=lambda: function, trusted=True)


def _others(operation: Operation) -> list[Candidate]:
    return [candidate for candidate in operation.candidates if candidate.name.startswith("trtllm.")]


def project_in(here: Here, kernels: Kernels) -> Operation:
    """operations.fused_a with our own kernel in place of torch's."""
    product = fused_a(here)
    candidates = (own(kernels.project_in), *_others(product))
    return dataclasses.replace(product, name="project_in", candidates=candidates, captured=True)


def route(here: Here, kernels: Kernels, experts: Experts) -> Operation:
    """x [T, D], router [E, D], bias [E] -> choice int32 and weight float32 [T, k]. Others' kernels compute logits; ours
    choose from them."""

    def inputs(case: Case, g: torch.Generator) -> tuple[Any, ...]:
        tokens = case["tokens"]
        router = weight_of(case, g, experts.num_experts, case["hidden"])
        bias = 0.1 * torch.randn(experts.num_experts, generator=g, device=case.device)
        x = _decided(random_of(case, g, 4 * tokens + 16, case["hidden"]), router, bias, experts, g)[:tokens]
        real = torch.tensor([tokens - tokens // 4], dtype=torch.int32, device=case.device)
        choice = torch.full((tokens, experts.top_k), experts.num_experts, dtype=torch.int32, device=case.device)
        return x, router, bias, experts, real, choice, torch.full_like(choice, torch.nan, dtype=torch.float32)

    def chosen_from(logits: Function) -> Function:
        def call(x: torch.Tensor, router: torch.Tensor, *rest: Any) -> None:
            kernels.choose(logits(x, router), *rest)

        return call

    return Operation(
        name="route",
        meaning="a token's experts and their weights",
        reference=reference.route,
        inputs=inputs,
        disagreement=_routes_disagree(experts.num_experts),
        candidates=(own(kernels.route), *(wrapped(c, chosen_from) for c in _others(router_product(here)))),
        filled=2,
        captured=True,
    )


def _decided(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor, experts: Experts, g: torch.Generator
) -> torch.Tensor:
    """Those rows of x whose experts stay the same after a small change of the router, so that the order in which a
    kernel adds numbers up cannot decide."""

    def chosen(weight: torch.Tensor) -> torch.Tensor:
        choice = torch.empty((len(x), experts.top_k), dtype=torch.int32, device=x.device)
        rows = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        reference.route(x, weight, bias, experts, rows, choice, torch.empty_like(choice, dtype=torch.float32))
        return choice.sort(dim=1).values

    wide = router.float()
    noise = torch.randn(wide.shape, generator=g, device=x.device)
    return x[(chosen(wide) == chosen(wide * (1 + NEAR * noise))).all(dim=1)].contiguous()


def _routes_disagree(num_experts: int) -> Function:
    close = relative_error(1e-3)

    def dense(routed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        choice, weight = routed
        return torch.zeros((len(choice), num_experts + 1), device=weight.device).scatter_(1, choice.long() + 1, weight)

    def disagreement(expected: tuple[torch.Tensor, torch.Tensor], got: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        outside = (got[0] < -1) | (got[0] >= num_experts)
        if bool(outside.any()):
            return f"{int(outside.sum())} choices are of no expert"
        padded = (expected[0] == -1) != (got[0] == -1)
        if bool(padded.any()):
            return f"{int(padded.any(dim=1).sum())} tokens are padding to one of them alone"
        return close(dense(expected), dense(got))

    return disagreement
