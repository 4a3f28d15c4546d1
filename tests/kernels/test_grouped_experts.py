"""The routed experts' kernels give what the plain form gives, however the tokens are spread over the experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from splash_plugins.grouped_experts import kernel, reference
from splash_plugins.grouped_experts.kernel import combine, grouped_experts
from splash_plugins.grouped_experts.sort_kernel import max_blocks, sort_pairs
from splash_plugins.grouped_experts.tiles import Device, Plan, Tiles, choose

pytestmark = pytest.mark.kernels

SMALL = Tiles(m=16, n=16, k=16, warps=4, stages=2, group=2)
BY_TMA = replace(SMALL, tma=True)
PLANS = {
    "measured": None,
    "few": Plan(few=True, gate_up=SMALL, down=SMALL),
    "few, by descriptor": Plan(few=True, gate_up=BY_TMA, down=BY_TMA),
    "many": Plan(few=False, gate_up=SMALL, down=SMALL),
    "many, by descriptor": Plan(few=False, gate_up=BY_TMA, down=BY_TMA),
}


def case(
    device: str, num_tokens: int, top_k: int, num_experts: int, local: int, hidden: int = 24, inner: int = 16
) -> dict[str, torch.Tensor]:
    torch.manual_seed(num_tokens * 8 + top_k)
    order = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k]
    return {
        "x": torch.randn(num_tokens, hidden, device=device),
        "choice": order.to(torch.int32).contiguous().to(device),
        "weight": torch.rand(num_tokens, top_k, device=device),
        "gate_up": torch.randn(local, 2 * inner, hidden, device=device) / hidden**0.5,
        "down": torch.randn(local, hidden, inner, device=device) / inner**0.5,
    }


def check(c: dict[str, torch.Tensor], first: int, addend: torch.Tensor | None, plan: Plan | None) -> torch.Tensor:
    got = torch.full_like(c["x"], torch.nan)
    want = torch.empty_like(c["x"])
    grouped_experts(**c, first_expert=first, addend=addend, out=got, plan=plan)
    reference.sum_of_experts(**c, first_expert=first, addend=addend, out=want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return got


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65])
def test_tokens(device: str, num_tokens: int, plan: str) -> None:
    c = case(device, num_tokens, 4, 12, 6)
    # Its rows lie apart, as those of a part of a wider tensor do.
    got = check(c, 4, torch.randn((num_tokens, 40), device=device)[:, :24], PLANS[plan])
    assert got.shape == (num_tokens, 24)


@pytest.mark.parametrize("plan", ["few", "many"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 6, 7, 8])
def test_choices(device: str, top_k: int, plan: str) -> None:
    check(case(device, 5, top_k, 8, 3), 5, None, PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_no_expert_here_leaves_the_addend(device: str, plan: str) -> None:
    c = case(device, 5, 2, 8, 3)
    addend = torch.randn_like(c["x"])
    assert torch.equal(check(c, 8, addend, PLANS[plan]), addend)
    assert torch.equal(check(c, 8, None, PLANS[plan]), torch.zeros_like(addend))


@pytest.mark.parametrize("plan", PLANS)
def test_one_expert_gets_everything(device: str, plan: str) -> None:
    c = case(device, 37, 1, 8, 8)
    c["choice"].fill_(6)
    check(c, 0, None, PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_padding_rows_get_the_addend_alone(device: str, plan: str) -> None:
    c = case(device, 20, 4, 8, 4)
    c["choice"][11:] = -1
    c["weight"][11:] = 0
    c["x"][11:] = torch.nan
    addend = torch.randn_like(c["x"])
    got = torch.empty_like(addend)
    grouped_experts(**c, first_expert=0, addend=addend, out=got, plan=PLANS[plan])
    assert torch.equal(got[11:], addend[11:])
    c["x"][11:] = 0
    check(c, 0, addend, PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_sizes_that_fill_no_tile(device: str, plan: str) -> None:
    check(case(device, 9, 2, 5, 5, hidden=36, inner=20), 0, None, PLANS[plan])


def test_the_addend_may_be_the_output(device: str) -> None:
    c = case(device, 6, 2, 8, 4)
    out = torch.randn_like(c["x"])
    want = torch.empty_like(out)
    reference.sum_of_experts(**c, first_expert=2, addend=out.clone(), out=want)
    grouped_experts(**c, first_expert=2, addend=out, out=out)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_weights_with_gate_and_up_apart(device: str) -> None:
    c = case(device, 3, 2, 4, 4)
    want = check(c, 0, None, None)
    c["gate_up"] = c["gate_up"].view(4, 2, 16, 24)
    assert torch.equal(check(c, 0, None, None), want)


@pytest.mark.parametrize("plan", PLANS)
def test_the_addend_is_read_once_it_is_ready(device: str, plan: str) -> None:
    c = case(device, 3, 2, 8, 4)
    addend, want, got = torch.full_like(c["x"], torch.nan), torch.empty_like(c["x"]), torch.empty_like(c["x"])
    calls = []

    def ready() -> None:
        calls.append(1)
        addend.fill_(2)

    grouped_experts(**c, first_expert=2, addend=addend, out=got, plan=PLANS[plan], ready=ready)
    assert len(calls) == 1
    reference.sum_of_experts(**c, first_expert=2, addend=addend, out=want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    reference.sum_of_experts(**c, first_expert=2, addend=addend.fill_(torch.nan), out=got, ready=ready)
    assert len(calls) == 2 and torch.equal(got, want)


@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_is_left_where_a_kernel_would_do_no_more(device: str, plan: str) -> None:
    c = case(device, 5, 3, 8, 3)
    c["choice"][3] = -1
    chosen, addend = PLANS[plan], torch.full_like(c["x"], torch.nan)
    want, got = torch.empty_like(c["x"]), torch.full_like(c["x"], torch.nan)
    grouped_experts(**c, first_expert=2, addend=torch.full_like(addend, 2), out=want, plan=chosen)
    calls = []

    def ready() -> None:
        calls.append(1)
        addend.fill_(2)

    left = grouped_experts(**c, first_expert=2, addend=addend, out=got, plan=chosen, ready=ready, defer=True)
    assert len(calls) == 1
    assert (left is not None) == (plan in ("measured", "few", "few, by descriptor"))
    if left is not None:
        assert left.joined and left.shape == (5, 24) and got.isnan().all()
        combine(left.y, left.choice, left.weight, left.first_expert, left.num_experts, left.addend, got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("defer", [False, True])
def test_more_pairs_than_temporaries_hold_are_done_in_parts(
    device: str, monkeypatch: pytest.MonkeyPatch, defer: bool
) -> None:
    """And no sum is left, which would be that of one part."""
    c = case(device, 5, 3, 8, 3)
    addend, want, got = torch.randn_like(c["x"]), torch.empty_like(c["x"]), torch.full_like(c["x"], torch.nan)
    reference.sum_of_experts(**c, first_expert=2, addend=addend, out=want)
    calls: list[int] = []
    monkeypatch.setattr(kernel, "MAX_PAIRS", 6)

    def ready() -> None:
        calls.append(1)

    left = grouped_experts(**c, first_expert=2, addend=addend, out=got, ready=ready, defer=defer)
    assert left is None
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert calls == [1]


@pytest.mark.parametrize("chosen", [0, 5, 40, 300, 1200])
@pytest.mark.parametrize("experts", [1, 5, 32])
def test_sort(device: str, experts: int, chosen: int) -> None:
    """Pairs come expert after expert in their order; blocks cover them all, each of one expert."""
    torch.manual_seed(experts)
    num_pairs, first = 2 * (chosen or 500), 3
    choice = torch.randint(-1, experts + 2 * first, (num_pairs // 2, 2), dtype=torch.int32, device=device)
    if chosen == 0:
        choice.fill_(-1)
    pairs, ends, blocks, num_blocks = sort_pairs(choice, experts, first, 16)
    flat = choice.flatten() - first
    want = [torch.nonzero(flat == e).flatten().tolist() for e in range(experts)]
    bounds = [0, *ends.tolist()]
    assert [pairs[b:e].tolist() for b, e in zip(bounds, bounds[1:], strict=False)] == want
    table = blocks[: int(num_blocks)].tolist()
    rows = [(e, r) for e, begin, end, _ in table for r in range(begin, end)]
    assert rows == [(e, r) for e in range(experts) for r in range(bounds[e], bounds[e + 1])]
    assert all(0 < end - begin <= 16 for _, begin, end, _ in table)
    assert len(table) <= max_blocks(num_pairs, experts, 16)


@pytest.mark.parametrize("shared_kib", [64, 99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_fit_the_device(shared_kib: int, itemsize: int) -> None:
    device = Device(processors=100, shared_bytes=shared_kib * 1024, tma=shared_kib == 227)
    for num_tokens in (1, 16, 64, 200, 1000, 5000, 16384):
        plan = choose(num_tokens, 4, 32, 2048, 1536, itemsize, device)
        assert plan.few or plan.gate_up.m == plan.down.m
        for operands, tiles in ((2, plan.gate_up), (1, plan.down)):
            used = (tiles.m + operands * tiles.n) * tiles.k * itemsize * tiles.stages
            assert used <= device.shared_bytes
            assert min(tiles.m, tiles.n, tiles.k) >= 16


@pytest.mark.parametrize("num_tokens", [1, 16, 40, 64, 65, 128, 700, 1024, 16384])
def test_tiles_are_those_of_as_many_rows_an_expert(num_tokens: int) -> None:
    """64 experts on two ranks, cut inside or whole: an expert has as many rows, of half the width."""
    device = Device(processors=100, shared_bytes=227 * 1024, tma=True)
    whole = choose(num_tokens, 4, 32, 2048, 1536, 2, device)
    assert choose(num_tokens, 4, 64, 2048, 768, 2, device, all_here=True) == whole


@pytest.mark.parametrize("num_tokens", [3, 65])
def test_slices_of_every_expert(device: str, num_tokens: int) -> None:
    """Two ranks' parts, 13 and 11 of 24 numbers, are together what whole experts give."""
    c = case(device, num_tokens, 3, 5, 5, inner=24)
    want, total = torch.empty_like(c["x"]), torch.zeros_like(c["x"])
    reference.sum_of_experts(**c, first_expert=0, addend=None, out=want)
    for begin, end in ((0, 13), (13, 24)):
        rows = [*range(begin, end), *range(24 + begin, 24 + end)]
        part = {**c, "gate_up": c["gate_up"][:, rows].contiguous(), "down": c["down"][:, :, begin:end].contiguous()}
        got = torch.full_like(want, torch.nan)
        grouped_experts(**part, first_expert=0, addend=None, out=got, all_here=True)
        total += got
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4)
