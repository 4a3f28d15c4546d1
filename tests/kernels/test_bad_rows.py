"""A token with numbers that are NaN or infinite changes no other token's result, in kernels that take several
tokens at once. Attention's are in test_mla_prefill.py and test_mla_decode.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from splash_plugins.absorb.kernel import absorb
from splash_plugins.few_rows.kernel import MOST_ROWS, gated, linear
from splash_plugins.few_rows.parts_kernel import MOST_ROWS as MOST_PARTED
from splash_plugins.few_rows.parts_kernel import linear_parts
from splash_plugins.grouped_experts.kernel import grouped_experts
from splash_plugins.norm.kernel import add_norm
from splash_plugins.router.kernel import route
from splash_plugins.value_up.kernel import value_up
from tests.kernels.test_grouped_experts import PLANS
from tests.kernels.test_router import experts_of

pytestmark = pytest.mark.kernels

HIDDEN, HEADS, NOPE, LATENT, ROPE = 48, 3, 24, 32, 8
EXPERTS = experts_of(8, 3)
Run = Callable[[torch.Tensor], torch.Tensor]


def random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device) / shape[-1] ** 0.5


def by_linear(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((len(x), 40))
    linear(x, random(str(x.device), 40, HIDDEN).to(x.dtype), out, columns=8)
    return out


def by_parts(x: torch.Tensor) -> torch.Tensor:
    """What is left to sum."""
    wide = x.repeat(1, 6)
    w = random(str(x.device), 6 * HIDDEN, 130).to(x.dtype).t()
    left = [linear_parts(rows, w) for rows in wide.split(MOST_PARTED)]
    return torch.cat([one.y for one in left if one is not None])


def by_gated(x: torch.Tensor) -> torch.Tensor:
    return gated(x, random(str(x.device), 2, 20, HIDDEN).to(x.dtype), columns=8)


def by_norm(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_norm(x.clone(), x, random(str(x.device), HIDDEN), 1e-6, out)
    return out


def by_absorb(x: torch.Tensor) -> torch.Tensor:
    q = x[:, : NOPE + ROPE, None].expand(-1, -1, HEADS).transpose(1, 2).contiguous()
    cos, out = torch.ones(len(x), ROPE // 2, device=x.device), x.new_empty((len(x), HEADS, LATENT + ROPE))
    absorb(q, cos, cos, True, random(str(x.device), HEADS, NOPE, LATENT), out)
    return out


def by_value_up(x: torch.Tensor) -> torch.Tensor:
    latents, out = x[:, None, :LATENT].repeat(1, HEADS, 1), x.new_empty((len(x), HEADS, 20))
    value_up(latents, random(str(x.device), HEADS, 20, LATENT), out)
    return out


def by_router(x: torch.Tensor) -> torch.Tensor:
    choice = torch.empty((len(x), EXPERTS.top_k), dtype=torch.int32, device=x.device)
    weight = torch.empty(choice.shape, device=x.device)
    num_tokens = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
    route(x, random(str(x.device), 8, HIDDEN), None, EXPERTS, num_tokens, choice, weight)
    assert ((choice >= 0) & (choice < 8)).all()
    return torch.cat([choice.to(weight.dtype), weight], dim=1)


def by_experts(plan: str) -> Run:
    def run(x: torch.Tensor) -> torch.Tensor:
        device = str(x.device)
        choice = (torch.arange(3 * len(x), device=device).view(-1, 3) % 8).to(torch.int32)
        out = torch.empty_like(x)
        gate_up, down = random(device, 8, 32, HIDDEN), random(device, 8, HIDDEN, 16)
        weight = torch.full(choice.shape, 0.5, device=device)
        grouped_experts(x, choice, weight, gate_up, down, 0, None, out, plan=PLANS[plan])
        return out

    return run


RUNS: dict[str, Run] = {
    "norm": by_norm,
    "absorb": by_absorb,
    "value_up": by_value_up,
    "router": by_router,
    **{f"experts, {plan}": by_experts(plan) for plan in PLANS},
}
HALVES: dict[str, Run] = {"linear": by_linear, "parts": by_parts, "gated": by_gated}


def check(run: Run, x: torch.Tensor) -> None:
    """Every third row from the second on is none: NaN and infinite in turn."""
    want = run(x)
    spoiled = x.clone()
    spoiled[1::6], spoiled[4::6] = torch.nan, torch.inf
    got = run(spoiled)
    good = [i for i in range(len(x)) if i % 3 != 1]
    assert want.isfinite().all() and torch.equal(got[good], want[good])


@pytest.mark.parametrize("rows", [6, 20])
@pytest.mark.parametrize("what", RUNS)
def test_others_get_the_same_bits(device: str, what: str, rows: int) -> None:
    check(RUNS[what], random(device, rows, HIDDEN) * 8)


@pytest.mark.parametrize("rows", [6, MOST_ROWS])
@pytest.mark.parametrize("what", HALVES)
def test_in_half_precision_too(device: str, what: str, rows: int) -> None:
    check(HALVES[what], (random(device, rows, HIDDEN) * 8).half())
