"""Random experts in the router's place: different ones, all equally likely, and the same wherever they are drawn."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from splash_engines import ops
from splash_trt.models.config import Experts, GroupScore, Scoring

EXPERTS = Experts(
    num_experts=8,
    top_k=3,
    intermediate_size=4,
    shared_intermediate_size=0,
    scoring=Scoring.SIGMOID,
    selection_bias=False,
    num_groups=1,
    top_groups=1,
    group_score=GroupScore.MAX,
    normalize=True,
    scale=1.0,
)
SIX_SIGMA = 6.0


def drawn(layers: int, tokens: int, positions: int, experts: Experts = EXPERTS) -> torch.Tensor:
    """[layers, tokens * positions, k]: every token at every position."""
    token, position = torch.arange(tokens).repeat(positions), torch.arange(positions).repeat_interleave(tokens)
    return ops.uniform_choice(layers, token, position, experts)


def deviations(counts: torch.Tensor) -> float:
    """The largest deviation from equal counts, in standard deviations of a binomial."""
    total, share = int(counts.sum()), 1 / counts.numel()
    return float((counts - total * share).abs().max() / (total * share * (1 - share)) ** 0.5)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 3), (64, 4), (256, 8), (5, 5), (7, 1)])
def test_a_tokens_experts_are_different_ones(num_experts: int, top_k: int) -> None:
    choice = drawn(3, 40, 40, dataclasses.replace(EXPERTS, num_experts=num_experts, top_k=top_k))
    assert choice.dtype is torch.int64 and choice.shape == (3, 1600, top_k)
    assert 0 <= int(choice.min()) and int(choice.max()) < num_experts
    ordered = choice.sort(dim=-1).values
    assert bool((ordered[..., 1:] > ordered[..., :-1]).all())


def test_all_sets_are_equally_likely() -> None:
    choice = drawn(4, 100, 100)
    ordered = choice.sort(dim=-1).values
    sets = (ordered * torch.tensor([64, 8, 1])).sum(dim=-1).flatten().bincount(minlength=512)
    assert int((sets > 0).sum()) == 56  # 8 over 3
    assert deviations(sets[sets > 0]) < SIX_SIGMA


@pytest.mark.parametrize("axis", ["layer", "token", "position"])
def test_layers_tokens_and_positions_choose_independently(axis: str) -> None:
    """The first experts of neighbours along an axis make all 64 pairs equally often (the first is drawn from 6)."""
    first = drawn(6, 60, 60)[..., 0].view(6, 60, 60)  # [layer, position, token]
    dim = ["layer", "position", "token"].index(axis)
    a, b = first.narrow(dim, 0, first.shape[dim] - 1), first.narrow(dim, 1, first.shape[dim] - 1)
    assert deviations((a * 6 + b).flatten().bincount(minlength=36)) < SIX_SIGMA


def test_a_token_chooses_the_same_in_any_batch_and_integer_type() -> None:
    token, position = torch.tensor([5, 9, 5, 154_879]), torch.tensor([0, 7, 1, 100_000])
    whole = ops.uniform_choice(3, token, position, EXPERTS)
    for i in range(4):
        alone = ops.uniform_choice(3, token[i : i + 1].int(), position[i : i + 1].int(), EXPERTS)
        assert torch.equal(alone[:, 0], whole[:, i])
    assert not torch.equal(whole[:, 0], whole[:, 2])
    assert ops.uniform_choice(3, token[:0], position[:0], EXPERTS).shape == (3, 0, 3)


def test_the_draw_is_splitmix64s() -> None:
    """Written again in plain integers, so that no device and no version of torch draws others."""
    wrap = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = x * 0x9E3779B97F4A7C15 & wrap
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & wrap
        x = (x ^ x >> 27) * 0x94D049BB133111EB & wrap
        return x ^ x >> 31

    def expected(layer: int, token: int, position: int) -> list[int]:
        key, chosen = mixed(mixed(mixed(layer) ^ position) ^ token), list[int]()
        for i in range(3):
            last = 8 - 3 + i
            draw = (mixed(key ^ (i + 1)) & ((1 << 63) - 1)) % (last + 1)
            chosen.append(last if draw in chosen else draw)
        return chosen

    found = drawn(5, 7, 6)
    for layer in range(5):
        for position in range(6):
            for token in range(7):
                assert found[layer, 7 * position + token].tolist() == expected(layer, token, position)
