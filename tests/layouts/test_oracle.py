"""Every layout computes the model: float64 against transformers in float64, at every prompt and generated position.

One run per case holds prompts of all kinds at once, so that continuous batching mixes prefill chunks and decodes; then
the same ranks serve a batch of one.
"""

from __future__ import annotations

import itertools

import pytest

from tests.layouts.harness import (
    LAYOUTS,
    Models,
    check_tokens,
    greedy,
    random_prompts,
    serve,
    worst_difference,
)
from tests.oracles.tiny_models import VARIANTS

PAGE = 8
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2, 5 * PAGE + 3, 2 * PAGE, 3 * PAGE - 1)
OUTPUTS = (8, 4, 6, 8, 9, 5, 3, 7)  # requests end one after another, the last one alone
BOUND = 1e-8

WHOLE = {"chunked": False, "max_batch_tokens": 1024, "context_block_tokens": 1024}
CHUNKED = {"chunked": True, "max_batch_tokens": 12, "context_block_tokens": 20}

Case = tuple[str, str, int, bool]
RANKS = (1, 2, 3, 4)
THOROUGH = ("v3_base", "v3_half_rope")  # four heads, groups of experts; five heads, biases, half-split rope
ONE_GROUP = "v2_grouped with one group"


def cases() -> list[Case]:
    """Layouts and ranks of THOROUGH in full; of the others each layout once. What is left is dealt out in turn."""
    pairs = itertools.product(THOROUGH, LAYOUTS, RANKS)
    out = [(n, layout, ranks, (i + i // 4 + i // 16) % 2 == 0) for i, (n, layout, ranks) in enumerate(pairs)]
    others = [name for name in VARIANTS if name not in THOROUGH]
    for i, name in enumerate(others):
        out += [(name, layout, RANKS[(i + j) % 4], (i + i // 4 + j) % 2 == 0) for j, layout in enumerate(LAYOUTS)]
    return out


def check(models: Models, name: str, layout: str, ranks: int, chunked: bool, experts_cut: str = "whole") -> None:
    prompts = random_prompts(LENGTHS)
    params = [greedy(n, logprobs=i % 3) for i, n in enumerate(OUTPUTS)]
    single = greedy(4, prompt_logprobs=None)  # only the last position of its prompt is wanted
    config = dict(CHUNKED if chunked else WHOLE)
    del config["chunked"]
    batch, alone = serve(
        models.folder(name),
        [(prompts, params), (prompts[5:6], [single])],
        ranks=ranks,
        layout=layout,
        page_tokens=PAGE,
        max_running=8,
        experts_cut=experts_cut,
        **config,
    )
    assert batch.num_preempted == 0
    assert (batch.num_mixed > 2) == chunked, "the case does not batch as it means to"
    assert worst_difference(models, name, batch.completions + alone.completions) < BOUND
    for completion, p in zip(batch.completions + alone.completions, [*params, single], strict=True):
        check_tokens(models, name, completion, p)


def test_the_sample_covers_every_pair() -> None:
    chosen = cases()
    for name in VARIANTS:
        assert {case[1] for case in chosen if case[0] == name} == set(LAYOUTS)
        assert {case[2] for case in chosen if case[0] == name} == set(RANKS)
        assert {case[3] for case in chosen if case[0] == name} == {False, True}
    for layout, ranks in itertools.product(LAYOUTS, RANKS):
        assert {case[3] for case in chosen if case[1:3] == (layout, ranks)} == {False, True}


@pytest.mark.parametrize(("name", "layout", "ranks", "chunked"), cases())
def test_layout_computes_the_model(models: Models, name: str, layout: str, ranks: int, chunked: bool) -> None:
    check(models, name, layout, ranks, chunked)


@pytest.mark.nightly
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_layout_computes_the_model_in_every_case(
    models: Models, name: str, layout: str, ranks: int, chunked: bool
) -> None:
    check(models, name, layout, ranks, chunked)


@pytest.mark.parametrize(("layout", "ranks"), [("tp", 2), ("cp", 3)])
def test_groups_that_leave_experts_out(models: Models, layout: str, ranks: int) -> None:
    """group_limited_greedy with fewer groups than experts chosen: else the best experts are in the best groups anyway,
    and the limit does nothing."""
    models.derive(ONE_GROUP, "v2_grouped", topk_group=1)
    check(models, ONE_GROUP, layout, ranks, chunked=True)


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        *(("v3_mtp", layout, 8) for layout in LAYOUTS),
        ("v3_half_rope", "cp", 6),
        ("v3_mtp", "dop", 10),  # eight experts: ranks with neither heads nor experts
    ],
)
def test_ranks_without_heads(models: Models, name: str, layout: str, ranks: int) -> None:
    check(models, name, layout, ranks, chunked=False)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [5, 6, 7, 8, 10])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["v3_mtp", "v3_half_rope"])
def test_more_ranks_in_every_case(models: Models, name: str, layout: str, ranks: int) -> None:
    check(models, name, layout, ranks, chunked=True)
