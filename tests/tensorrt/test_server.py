"""The whole server on networks: all as always but for segments and attention, which are evaluated networks.

The reference is plain torch on one rank that never switches. In float32 a first difference of tokens is accepted
only where the reference had the two nearly tied; in float64, where the networks' constants are all that is rounded,
never.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from splash_trt.config import Layout
from splash_trt.dist.collectives import RankFailure
from splash_trt.llm import LLM
from splash_trt.models.families import load_config
from tests.layouts.harness import Models, random_prompts
from tests.tensorrt.evaluated import Networks, evaluator
from tests.tensorrt.served import Told, first_differences, requests, serve, worst_logprob

DEMO = Path(__file__).parents[2] / "models" / "splash-tiny"
TEXT = b"To be, or not to be, that is the question"
TP, DP, CP, DOP = Layout.TP, Layout.DP, Layout.CP, Layout.DOP
TOURS = {1: (TP, DP, CP, DOP), 2: (DP, TP, CP, DOP), 3: (DOP, CP), 4: (CP, DOP, DP, TP)}
EVERY_PAIR = tuple(Layout.parse(name) for name in "tp dp tp cp tp dop dp cp dp dop cp dop tp".split())

NEAR_TIE = 1e-3
"""float32: log-probabilities differ by 2e-6 in the median, and by 1e-4 where a router is nearly tied."""
CLOSE = 1e-4
EXACT = 1e-6


@pytest.fixture(scope="module")
def asked() -> Sequence:
    return requests([list(TEXT[:n]) for n in (5, 28, 9, 1)], 9)


@pytest.fixture(scope="module")
def expected(asked: Sequence) -> dict[str, Told]:
    return serve(DEMO, asked, ranks=1, tour=[TP], dtype="float32")


@pytest.fixture(scope="module")
def demo_networks() -> Networks:
    return Networks(load_config(DEMO), torch.float32)


def check_float32(got: dict[str, Told], expected: dict[str, Told]) -> None:
    apart = [(request, at, gap) for request, at, gap in first_differences(got, expected) if not gap < NEAR_TIE]
    assert not apart, apart
    assert worst_logprob(got, expected) < CLOSE


def test_experts_cut_inside_are_refused(demo_networks: Networks) -> None:
    with evaluator(demo_networks), pytest.raises(RankFailure, match="experts_cut: 'inside'"):
        LLM(DEMO, experts_cut="inside")


@pytest.mark.parametrize("ranks", list(TOURS))
def test_demo_model(demo_networks: Networks, asked: Sequence, expected: dict[str, Told], ranks: int) -> None:
    """Experts and attention as networks too."""
    with evaluator(demo_networks) as networks:
        got = serve(DEMO, asked, ranks=ranks, tour=TOURS[ranks], dtype="float32")
    check_float32(got, expected)
    used = {kind for kind, count in networks.calls.items() if count}
    assert used >= {"embed", "attention_in", "absorb", "v_up", "expand_kv", "attention_out", "dense_mlp", "moe", "head"}
    assert used >= {"attend_absorbed", "attend_expanded"}


def test_plugins_between_and_sums_inside(asked: Sequence, expected: dict[str, Told]) -> None:
    """Experts and attention by the plugins' references, sums over ranks as DistCollective layers."""
    networks = Networks(load_config(DEMO), torch.float32, experts="moe_in", collectives_in=True)
    with evaluator(networks, attention=False):
        got = serve(DEMO, asked, ranks=2, tour=(TP, DP, DOP), dtype="float32")
    check_float32(got, expected)
    assert "moe" not in networks.calls and "attend_absorbed" not in networks.calls


def test_a_rank_without_heads(models: Models) -> None:
    """3 heads on 4 ranks, greedy and drawn tokens, in float64: the same tokens."""
    folder = models.folder("v3_mtp")
    prompts = random_prompts((9, 3, 20, 1))
    asked = [*requests(prompts, 8), *requests(prompts, 8, sampled=True)]
    expected = serve(folder, asked, ranks=1, tour=[TP], dtype="float64")
    with evaluator(Networks(models.config("v3_mtp"), torch.float64)):
        got = serve(folder, asked, ranks=4, tour=(DP, TP, CP, DOP), dtype="float64")
    assert first_differences(got, expected) == []
    assert worst_logprob(got, expected) < EXACT


def test_bfloat16() -> None:
    """Rounded in about the same places as plain torch: the two are as near to each other as that allows."""
    asked = requests([list(TEXT[:n]) for n in (11, 3, 8)], 5)
    expected = serve(DEMO, asked, ranks=2, tour=[DP], dtype="bfloat16")
    with evaluator(Networks(load_config(DEMO), torch.bfloat16)):
        got = serve(DEMO, asked, ranks=2, tour=[DP], dtype="bfloat16")
    first = [(told.entries[0], got[key].entries[0]) for key, told in expected.items()]
    assert max(abs(a.logprob - b.logprob) for a, b in first if a.token == b.token) < 0.25
    apart = [(request, at, gap) for request, at, gap in first_differences(got, expected) if not gap < 0.25]
    assert not apart, apart


def test_a_defect_is_told(expected: dict[str, Told]) -> None:
    """A softmax scale that is wrong by a tenth in the networks alone."""
    model = load_config(DEMO)
    wrong = Networks(dataclasses.replace(model, softmax_scale=model.softmax_scale * 1.1), torch.float32)
    asked = requests([list(TEXT[:5])], 9)
    with evaluator(wrong):
        got = serve(DEMO, asked, ranks=1, tour=[TP], dtype="float32")
    with pytest.raises(AssertionError):
        check_float32(got, expected)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("experts", "inside"), list(itertools.product(("moe", "moe_in"), (False, True))))
def test_every_switch(
    asked: Sequence, expected: dict[str, Told], ranks: int, experts: str, inside: bool
) -> None:
    networks = Networks(load_config(DEMO), torch.float32, experts=experts, collectives_in=inside)
    with evaluator(networks, attention=experts == "moe"):
        got = serve(DEMO, asked, ranks=ranks, tour=EVERY_PAIR, dtype="float32")
    check_float32(got, expected)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["v3_half_rope", "v2_grouped", "glm_flat_mtp", "v3_tied", "glm_mixed"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_other_models(models: Models, name: str, ranks: int) -> None:
    """Biases, no query latent, tied embeddings, groups, yarn: every tour in float64."""
    folder = models.folder(name)
    asked = requests(random_prompts((9, 3, 20, 1, 14, 7)), 12)
    expected = serve(folder, asked, ranks=1, tour=[TP], dtype="float64")
    with evaluator(Networks(models.config(name), torch.float64)):
        got = serve(folder, asked, ranks=ranks, tour=EVERY_PAIR if ranks > 1 else TOURS[1], dtype="float64")
    assert first_differences(got, expected) == []
    assert worst_logprob(got, expected) < EXACT
