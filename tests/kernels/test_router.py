"""The router's kernel chooses what the plain one does: scores, bias, groups, ties, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splash_engines import ops
from splash_plugins.router import kernel, reference
from splash_plugins.router.kernel import choose, route
from splash_plugins.router.tiles import NARROW, WIDE, Tiles, choose_tiles, fit
from splash_trt.models.config import Experts, GroupScore, Scoring

pytestmark = pytest.mark.kernels


def experts_of(num_experts: int, top_k: int, **changes: object) -> Experts:
    fields: dict[str, object] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": 16,
        "shared_intermediate_size": 0,
        "scoring": Scoring.SIGMOID,
        "selection_bias": True,
        "num_groups": 1,
        "top_groups": 1,
        "group_score": GroupScore.TOP2_SUM,
        "normalize": True,
        "scale": 1.8,
    }
    return Experts(**{**fields, **changes})  # type: ignore[arg-type]


def routed(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, experts: Experts, real: int, way: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's (choice, weight), held against the reference's."""
    shape = (len(x), experts.top_k)
    num_tokens = torch.tensor([real], dtype=torch.int32, device=x.device)
    got = torch.full(shape, -7, dtype=torch.int32, device=x.device), torch.full(shape, torch.nan, device=x.device)
    want = torch.empty_like(got[0]), torch.empty_like(got[1])
    route(x, router, bias, experts, num_tokens, *got, tiles=tiles_of(way, experts, x.shape[1]))
    reference.route(x, router, bias, experts, num_tokens, *want)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)
    return got


WAYS = {
    "fused": Tiles(rows=32, columns=256, block_k=32, warps=4, stages=2, fused=True),
    "slices": Tiles(rows=16, columns=256, block_k=32, warps=4, stages=2, slices=3, choose_rows=4),
    "columns": Tiles(rows=32, columns=16, block_k=64, warps=2, stages=3, slices=2, choose_rows=2),
}
"""Beside "chosen", by the number of rows."""


def tiles_of(way: str, experts: Experts, width: int) -> Tiles | None:
    if way == "chosen":
        return None
    groups, columns = _held(experts)
    return fit(WAYS[way], groups, columns, width, 2, 96 * 1024)


def _held(experts: Experts) -> tuple[int, int]:
    """Groups and columns, as the kernel pads them."""
    groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    groups, size = 1 << (groups - 1).bit_length(), 1 << (size - 1).bit_length()
    return groups, max(16, groups * size)


FORMS = {
    "glm": experts_of(64, 4),
    "deepseek-v3": experts_of(64, 8, num_groups=8, top_groups=4, scale=2.5),
    "deepseek-v2": experts_of(
        40,
        6,
        num_groups=4,
        top_groups=3,
        group_score=GroupScore.MAX,
        scoring=Scoring.SOFTMAX,
        selection_bias=False,
        normalize=False,
        scale=16.0,
    ),
    "odd": experts_of(21, 3, num_groups=3, top_groups=2, scoring=Scoring.SOFTMAX),
    "one": experts_of(6, 1, scoring=Scoring.SOFTMAX, selection_bias=False),
    "tiny": experts_of(8, 8),
    "groups": experts_of(48, 4, num_groups=12, top_groups=5),
    "wide": experts_of(160, 6, num_groups=8, top_groups=3, group_score=GroupScore.MAX, scoring=Scoring.SOFTMAX),
}


@pytest.mark.parametrize("way", [*WAYS, "chosen"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 3, 37])
def test_route_agrees(device: str, form: str, num_tokens: int, way: str) -> None:
    experts = FORMS[form]
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 96, device=device)
    router = torch.randn(experts.num_experts, 96, device=device) / 8
    bias = torch.randn(experts.num_experts, device=device) / 4 if experts.selection_bias else None
    choice, weight = routed(x, router, bias, experts, num_tokens, way)
    plain_choice, plain_weight = ops.route(x, router, bias, experts)
    torch.testing.assert_close(choice.long(), plain_choice)
    torch.testing.assert_close(weight, plain_weight, rtol=1e-5, atol=1e-6)


def test_slices_too_large_to_load_before_the_rows(device: str) -> None:
    torch.manual_seed(1)
    x, router = torch.randn(3, 672, device=device), torch.randn(64, 672, device=device) / 8
    assert not fit(WAYS["slices"], 1, 64, 672, 2, 96 * 1024).early(672, 4)
    routed(x, router, torch.zeros(64, device=device), FORMS["glm"], 3, "slices")


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_padding_choose_nobody(device: str, way: str) -> None:
    experts = FORMS["glm"]
    x = torch.randn(40, 96, device=device)
    x[17:] = torch.nan  # whatever was there before
    choice, weight = routed(
        torch.where(x.isnan(), 0.0, x), torch.randn(64, 96, device=device), torch.zeros(64, device=device), experts, 17,
        way,
    )  # fmt: skip
    assert (choice[17:] == -1).all() and (weight[17:] == 0).all()
    assert (choice[:17] >= 0).all()
    num_tokens = torch.tensor([17], dtype=torch.int32, device=device)
    tiles = tiles_of(way, experts, 96)
    route(x, torch.randn(64, 96, device=device), None, experts, num_tokens, choice, weight, tiles=tiles)
    assert (choice[17:] == -1).all() and (weight[17:] == 0).all() and weight.isfinite().all()


@pytest.mark.parametrize("form", ["glm", "deepseek-v3"])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_choosing_from_logits_that_others_made(device: str, form: str, num_tokens: int) -> None:
    experts = FORMS[form]
    logits = torch.randn(num_tokens, 64, device=device)
    bias = torch.randn(64, device=device) / 4
    real = torch.tensor([num_tokens - 2], dtype=torch.int32, device=device)
    logits[num_tokens - 2 :] = torch.nan if num_tokens > 2 else 1.0
    got = (
        torch.full((num_tokens, experts.top_k), -7, dtype=torch.int32, device=device),
        torch.full((num_tokens, experts.top_k), torch.nan, device=device),
    )
    want = torch.empty_like(got[0]), torch.empty_like(got[1])
    choose(logits, bias, experts, real, *got)
    reference.choose(logits, bias, experts, real, *want)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("groups", "rows"), [(1, 2), (8, 2), (32, 2), (64, 1)])
def test_choosing_from_logits_compares_no_more_groups_than_a_program_can(
    device: str, monkeypatch: pytest.MonkeyPatch, groups: int, rows: int
) -> None:
    experts = experts_of(128, 4, num_groups=groups, top_groups=min(groups, 4), group_score=GroupScore.MAX)
    asked = []

    def noted(*arguments: Any) -> None:
        asked.append(arguments[-1])
        choose_from(*arguments)

    choose_from = kernel._choose_from
    monkeypatch.setattr(kernel, "_choose_from", noted)
    logits, bias = torch.randn(3, 128, device=device), torch.randn(128, device=device) / 4
    real = torch.tensor([3], dtype=torch.int32, device=device)
    got = torch.zeros(3, 4, dtype=torch.int32, device=device), torch.zeros(3, 4, device=device)
    want = torch.empty_like(got[0]), torch.empty_like(got[1])
    choose(logits, bias, experts, real, *got)
    reference.choose(logits, bias, experts, real, *want)
    assert torch.equal(got[0], want[0]) and asked == [rows]


@pytest.mark.parametrize("real", [0, 5])
def test_more_padding_than_rows(device: str, real: int) -> None:
    """num_tokens 0: all padding; more than there are rows: none."""
    experts = FORMS["glm"]
    choice, _ = routed(
        torch.randn(5, 64, device=device), torch.randn(64, 64, device=device), None, experts, real * 2, "chosen"
    )
    assert (choice >= 0).all() == (real > 0)


@pytest.mark.parametrize("form", ["glm", "deepseek-v3", "odd", "groups", "wide"])
@pytest.mark.parametrize("way", WAYS)
def test_ties_go_to_the_lowest_ids(device: str, form: str, way: str) -> None:
    experts = FORMS[form]
    x = torch.ones(3, 64, device=device)
    router = torch.zeros(experts.num_experts, 64, device=device)
    choice, _ = routed(x, router, torch.zeros(experts.num_experts, device=device), experts, 3, way)
    assert choice[0].tolist() == list(range(experts.top_k))
    # Two levels: all of the second half are equal and better, and some values are negative with the bias.
    bias = torch.full((experts.num_experts,), -2.0, device=device)
    bias[experts.num_experts // 2 :] = -1.0
    routed(x, router, bias, experts, 3, way)


@pytest.mark.parametrize("form", ["glm", "deepseek-v3", "wide"])
def test_many_ties_among_different_values(device: str, form: str) -> None:
    """Logits are exact and take few values: choices must be the reference's in every row."""
    experts = FORMS[form]
    random = torch.Generator().manual_seed(4)
    x = torch.randint(-1, 2, (33, 64), generator=random).float().to(device)
    router = torch.randint(-1, 2, (experts.num_experts, 64), generator=random).float().to(device) / 8
    for way in WAYS:
        routed(x, router, None, experts, 33, way)


@pytest.mark.parametrize("form", ["glm", "deepseek-v3"])
def test_numbers_that_are_none_come_first(device: str, form: str) -> None:
    experts = FORMS[form]
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(device)
    logits[0, 40], logits[1, 33], logits[1, 9], logits[2, 5] = torch.nan, torch.nan, -torch.nan, torch.inf
    bias, real = torch.zeros(64, device=device), torch.tensor([3], dtype=torch.int32, device=device)
    bias[7], bias[60] = -torch.inf, torch.inf
    shape = (3, experts.top_k)
    got = torch.full(shape, -7, dtype=torch.int32, device=device), torch.zeros(shape, device=device)
    want = torch.empty_like(got[0]), torch.empty_like(got[1])
    choose(logits, bias, experts, real, *got)
    reference.choose(logits, bias, experts, real, *want)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert got[0][0, 0] == 40 and got[0][1, :2].tolist() == [9, 33]


def test_numbers_that_are_none_choose_experts_that_exist(device: str) -> None:
    experts = FORMS["deepseek-v3"]
    x = torch.full((2, 64), torch.nan, device=device)
    choice = torch.full((2, 8), -7, dtype=torch.int32, device=device)
    weight = torch.zeros(2, 8, device=device)
    num_tokens = torch.tensor([2], dtype=torch.int32, device=device)
    route(x, torch.randn(64, 64, device=device), None, experts, num_tokens, choice, weight)
    assert ((choice >= 0) & (choice < 64)).all()
    assert weight.isnan().all()


def test_no_tokens(device: str) -> None:
    experts = FORMS["glm"]
    empty = torch.empty(0, 4, dtype=torch.int32, device=device), torch.empty(0, 4, device=device)
    num_tokens = torch.zeros(1, dtype=torch.int32, device=device)
    route(torch.empty(0, 64, device=device), torch.randn(64, 64, device=device), None, experts, num_tokens, *empty)


@pytest.mark.parametrize("shared_kib", [64, 99, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sizes", [(1, 64, 2048), (8, 256, 7168), (1, 16, 96), (64, 128, 512), (1, 512, 4096)])
def test_tiles_cover_the_product_and_fit_a_block(sizes: tuple[int, int, int], itemsize: int, shared_kib: int) -> None:
    groups, columns, width = sizes
    counts = sorted({n for form in (*NARROW, *WIDE) for n in (1, min(form.tokens, 20000), min(form.tokens + 1, 20000))})
    for num_rows in counts:
        tiles = choose_tiles(num_rows, groups, columns, width, itemsize, shared_kib * 1024)
        assert columns % tiles.columns == 0
        assert tiles.slice_width(width) % tiles.block_k == 0
        assert tiles.slice_width(width) * tiles.slices >= width
        assert not tiles.fused or (tiles.slices, tiles.columns) == (1, columns)
        stage = (tiles.rows + tiles.columns) * tiles.block_k * itemsize
        assert tiles.stages * stage < shared_kib * 1024
        assert 1 <= tiles.choose_rows * groups**2 <= 4096
