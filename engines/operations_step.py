"""Operations of a step that have Triton kernels of ours beside the plain reference.

T tokens, D hidden, I intermediate, E_r experts here, k choices a token, H heads, L latent, R rope part, W = L + R;
P pages of S rows.
"""

from __future__ import annotations

from typing import Any

import torch

from splash_engines.operations import Here, random_of, torch_candidate, triton_candidate, weight_of, wrapped
from splash_engines.registry import Candidate, Case, Function, Operation, relative_error
from splash_plugins.grouped_experts.reference import sum_of_experts
from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.cut import Parts, cut, num_sms_of
from splash_plugins.mla_attention.decode_reference import decode
from splash_plugins.norm.reference import add_norm
from splash_plugins.silu_mul.reference import silu_mul

PAGE_TOKENS = 64
EPS = 1e-5


def step_operations(here: Here) -> tuple[Operation, ...]:
    return (norm(here), activation(here), experts(here), attention(here), merge(here))


def _candidates(here: Here, module: str, name: str, reference: Function) -> tuple[Candidate, Candidate]:
    return torch_candidate(reference), triton_candidate(here, module, name)


def _unset(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a function fills: nothing that could be taken for a result."""
    return torch.full(shape, torch.nan, dtype=dtype or like.dtype, device=like.device)


def norm(here: Here) -> Operation:
    """hidden and delta [T, D], weight [D], eps to hidden + delta, in place, and its norm [T, D]."""

    def inputs(case: Case, g: torch.Generator) -> tuple[Any, ...]:
        hidden, delta = (random_of(case, g, case["tokens"], case["hidden"]) for _ in range(2))
        return hidden, delta, random_of(case, g, case["hidden"]), EPS, _unset(hidden, *hidden.shape)

    return Operation(
        name="add_norm",
        meaning="the residual's sum and its RMS norm",
        reference=add_norm,
        inputs=inputs,
        disagreement=relative_error(1e-2),
        candidates=_candidates(here, "norm.kernel", "add_norm", add_norm),
        filled=1,
    )


def activation(here: Here) -> Operation:
    """[T, 2 I], the gate first, to [T, I]."""
    return Operation(
        name="silu_mul",
        meaning="silu(gate) * up of a gated MLP",
        reference=silu_mul,
        inputs=lambda case, g: (random_of(case, g, case["tokens"], 2 * case["inner"]),),
        disagreement=relative_error(1e-2),
        candidates=_candidates(here, "silu_mul.kernel", "silu_mul", silu_mul),
    )


def experts(here: Here) -> Operation:
    """x [T, D], choice int32 and weight float32 [T, k], gate_up [E_r, 2 I, D], down [E_r, D, I] to [T, D]."""

    def inputs(case: Case, g: torch.Generator) -> tuple[Any, ...]:
        tokens, hidden, inner, here_too = case["tokens"], case["hidden"], case["inner"], case["experts"]
        gate_up = weight_of(case, g, here_too * 2 * inner, hidden).view(here_too, 2 * inner, hidden)
        down = weight_of(case, g, here_too * hidden, inner).view(here_too, hidden, inner)
        score = torch.rand((tokens, 2 * here_too), generator=g, device=case.device)
        weight, chosen = score.topk(case["top_k"], dim=-1)
        x = random_of(case, g, tokens, hidden)
        return x, chosen.to(torch.int32), weight, gate_up, down, 0, None, _unset(x, tokens, hidden)

    own = _candidates(here, "grouped_experts.kernel", "grouped_experts", sum_of_experts)
    product = triton_candidate(here, "grouped_experts.torch_kernel", "grouped_experts")
    return Operation(
        name="grouped_experts",
        meaning="the routed experts of this rank, half of all",
        reference=sum_of_experts,
        inputs=inputs,
        disagreement=relative_error(2e-2),
        candidates=(*own, Candidate(name="torch.grouped_mm", load=product.load, unfit=_grouped_mm_unfit)),
        filled=1,
    )


def _grouped_mm_unfit(case: Case) -> str | None:
    if case.dtype is not torch.bfloat16:
        return f"it takes bfloat16, not {case.dtype}"
    return "rows are no multiples of 16 bytes" if case["hidden"] % 8 or case["inner"] % 8 else None


def attention(here: Here) -> Operation:
    """q [T, H, W], a layer's pool [P, S, W] with its tables and lengths to values [T, H, L] and log-sum-exp [T, H]."""

    def inputs(case: Case, g: torch.Generator) -> tuple[Any, ...]:
        tokens, width = case["tokens"], case["latent"] + case["rope"]
        pages = -(-case["context"] // PAGE_TOKENS)
        pool = random_of(case, g, tokens * pages, PAGE_TOKENS, width)
        device = case.device
        tables = torch.randperm(tokens * pages, generator=g, device=device).view(tokens, pages)
        length = torch.randint(1, case["context"] + 1, (tokens,), generator=g, device=device)
        slot = torch.randperm(tokens, generator=g, device=device)
        lists = [x.to(torch.int32) for x in (tables, slot, torch.zeros_like(slot), length)]
        q = random_of(case, g, tokens, case["heads"], width)
        out = _unset(q, tokens, case["heads"], case["latent"]), _unset(q, tokens, case["heads"], dtype=torch.float32)
        found = cut(length.cpu().numpy(), case["heads"], num_sms_of(device))
        parts = Parts(*(torch.from_numpy(x).to(device) for x in found))
        return q, pool, *lists, parts, 1, case["latent"], width**-0.5, *out

    close = relative_error(2e-2)

    def disagreement(expected: tuple[torch.Tensor, ...], got: tuple[torch.Tensor, ...]) -> str | None:
        return next(filter(None, map(close, expected, got)), None)

    return Operation(
        name="mla_attention",
        meaning="absorbed queries against paged latent rows (decode)",
        reference=decode,
        inputs=inputs,
        disagreement=disagreement,
        candidates=_candidates(here, "mla_attention.decode_kernel", "decode", decode),
        filled=2,
    )


def merge(here: Here) -> Operation:
    """outs [K, T, H, L] and lses [K, T, H] of K parts, float32, to out [T, H, L]."""

    def first(function: Function) -> Function:
        return lambda outs, lses: function(outs, lses)[0]

    def inputs(case: Case, g: torch.Generator) -> tuple[torch.Tensor, ...]:
        shape = (case["parts"], case["tokens"], case["heads"])
        wide = torch.float32
        return random_of(case, g, *shape, case["latent"], dtype=wide), random_of(case, g, *shape, dtype=wide)

    reference, kernel = first(lse_merge), triton_candidate(here, "lse_merge.kernel", "lse_merge")
    return Operation(
        name="lse_merge",
        meaning="attention over parts of a context, merged",
        reference=reference,
        inputs=inputs,
        disagreement=relative_error(1e-5),
        candidates=(torch_candidate(reference), wrapped(kernel, first)),
    )
