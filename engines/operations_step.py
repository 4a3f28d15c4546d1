"""Operations of a step that have Triton kernels of ours beside the plain reference.

T tokens, D hidden, I intermediate, E experts, k choices a token, H heads, L latent, W = L + R; S rows a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from splash_engines.operations import Here, random_of, torch_candidate, triton_candidate, weight_of
from splash_engines.registry import Candidate, Case, Function, Operation, relative_error
from splash_plugins.grouped_experts.reference import sum_of_experts
from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.decode_reference import decode
from splash_plugins.norm.reference import add_norm
from splash_plugins.silu_mul.reference import silu_mul

PAGE_TOKENS = 64
EPS = 1e-5


def step_operations(here: Here) -> tuple[Operation, ...]:
    return (norm(here), activation(here), experts(here), attention(here), merge(here))


def _filling(function: Function, empty: Callable[..., tuple[torch.Tensor, ...]]) -> Function:
    """One that returns what `function` fills: empty makes its last arguments from the others."""

    def call(*arguments: Any) -> torch.Tensor:
        out = empty(*arguments)
        function(*arguments, *out)
        return out[0]

    return call


def _candidates(
    here: Here, module: str, name: str, reference: Function, empty: Callable[..., tuple[torch.Tensor, ...]]
) -> tuple[Candidate, Candidate]:
    kernel = triton_candidate(here, module, name)

    def load() -> Function | str:
        found = kernel.load()
        return found if isinstance(found, str) else _filling(found, empty)

    return torch_candidate(reference), Candidate(name=kernel.name, load=load, unfit=kernel.unfit)


def norm(here: Here) -> Operation:
    def empty(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return (torch.full_like(hidden, torch.nan),)

    reference = _filling(add_norm, empty)
    return Operation(
        name="add_norm",
        meaning="the residual's sum and its RMS norm",
        reference=reference,
        inputs=lambda case, g: (
            random_of(case, g, case["tokens"], case["hidden"]),
            random_of(case, g, case["tokens"], case["hidden"]),
            random_of(case, g, case["hidden"]),
            EPS,
        ),
        disagreement=relative_error(1e-2),
        candidates=_candidates(here, "norm.kernel", "add_norm", reference, empty),
    )


def activation(here: Here) -> Operation:
    return Operation(
        name="silu_mul",
        meaning="silu(gate) * up of a gated MLP",
        reference=silu_mul,
        inputs=lambda case, g: (random_of(case, g, case["tokens"], 2 * case["inner"]),),
        disagreement=relative_error(1e-2),
        candidates=(torch_candidate(silu_mul), triton_candidate(here, "silu_mul.kernel", "silu_mul")),
    )


def experts(here: Here) -> Operation:
    def empty(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return (torch.full_like(x, torch.nan),)

    def inputs(case: Case, g: torch.Generator) -> tuple[Any, ...]:
        tokens, hidden, inner, here_too = case["tokens"], case["hidden"], case["inner"], case["experts"]
        gate_up = weight_of(case, g, here_too * 2 * inner, hidden).view(here_too, 2 * inner, hidden)
        down = weight_of(case, g, here_too * hidden, inner).view(here_too, hidden, inner)
        score = torch.rand((tokens, 2 * here_too), generator=g, device=case.device)
        weight, chosen = score.topk(case["top_k"], dim=-1)
        return random_of(case, g, tokens, hidden), chosen.to(torch.int32), weight, gate_up, down, 0, None

    reference = _filling(sum_of_experts, empty)
    own = _candidates(here, "grouped_experts.kernel", "grouped_experts", reference, empty)
    product = triton_candidate(here, "grouped_experts.torch_kernel", "grouped_experts")

    def load() -> Function | str:
        found = product.load()
        return found if isinstance(found, str) else _filling(found, empty)

    return Operation(
        name="grouped_experts",
        meaning="the routed experts of this rank, half of all",
        reference=reference,
        inputs=inputs,
        disagreement=relative_error(2e-2),
        candidates=(*own, Candidate(name="torch.grouped_mm", load=load, unfit=_grouped_mm_unfit)),
    )


def _grouped_mm_unfit(case: Case) -> str | None:
    if case.dtype is not torch.bfloat16:
        return f"it takes bfloat16, not {case.dtype}"
    return "rows are no multiples of 16 bytes" if case["hidden"] % 8 or case["inner"] % 8 else None


def attention(here: Here) -> Operation:
    def inputs(case: Case, g: torch.Generator) -> tuple[Any, ...]:
        tokens, width = case["tokens"], case["latent"] + case["rope"]
        pages = -(-case["context"] // PAGE_TOKENS)
        pool = random_of(case, g, tokens * pages, PAGE_TOKENS, width)
        device = case.device
        tables = torch.randperm(tokens * pages, generator=g, device=device).view(tokens, pages)
        length = torch.randint(1, case["context"] + 1, (tokens,), generator=g, device=device)
        slot = torch.randperm(tokens, generator=g, device=device)
        lists = [x.to(torch.int32) for x in (tables, slot, torch.zeros_like(slot), length)]
        return random_of(case, g, tokens, case["heads"], width), pool, *lists, 1, case["latent"], width**-0.5

    def empty(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        out = q.new_full((*q.shape[:2], rest[6]), torch.nan)
        return out, torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)

    reference = _filling(decode, empty)
    return Operation(
        name="mla_attention",
        meaning="absorbed queries against paged latent rows (decode)",
        reference=reference,
        inputs=inputs,
        disagreement=relative_error(2e-2),
        candidates=_candidates(here, "mla_attention.decode_kernel", "decode", reference, empty),
    )


def merge(here: Here) -> Operation:
    def first(function: Function) -> Function:
        return lambda outs, lses: function(outs, lses)[0]

    kernel = triton_candidate(here, "lse_merge.kernel", "lse_merge")

    def load() -> Function | str:
        found = kernel.load()
        return found if isinstance(found, str) else first(found)

    def inputs(case: Case, g: torch.Generator) -> tuple[torch.Tensor, ...]:
        shape = (case["parts"], case["tokens"], case["heads"])
        wide = torch.float32
        return random_of(case, g, *shape, case["latent"], dtype=wide), random_of(case, g, *shape, dtype=wide)

    reference = first(lse_merge)
    return Operation(
        name="lse_merge",
        meaning="attention over parts of a context, merged",
        reference=reference,
        inputs=inputs,
        disagreement=relative_error(1e-5),
        candidates=(torch_candidate(reference), Candidate(name=kernel.name, load=load, unfit=kernel.unfit)),
    )
