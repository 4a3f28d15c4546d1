"""No layout, cut, cache size or batching changes a request's tokens, greedy or sampled.

In float64, where sums in another order do not matter (see tests/oracles/README.md). Everything is compared with one
rank, a cache that holds it all and one chunk a prompt; that run itself is compared with the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splash_trt.request import Completion, SamplingParams
from tests.layouts.harness import (
    LAYOUTS,
    Models,
    Result,
    check_tokens,
    entries,
    memory_for,
    random_prompts,
    serve,
    worst_difference,
)

NAMES = ("v3_half_rope", "v2_grouped", "glm_flat_mtp")  # 5, 8 and 3 heads, one of each family
LENGTHS = (14, 1, 9, 34, 3, 17, 4, 12)
OUTPUTS = (20, 22, 18, 14, 22, 12, 20, 16)
REQUEST_TOKENS = max(a + b for a, b in zip(LENGTHS, OUTPUTS, strict=True))
BOUND = 1e-9

FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_k": 5, "seed": 12},
    {"temperature": 1.3, "top_p": 0.8, "seed": 2**63 - 1},
    {"temperature": 1.5, "min_p": 0.05, "seed": 0},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 15},
    {"temperature": 1.0, "seed": 11},  # the seed of another request
)


def params() -> list[SamplingParams]:
    """Greedy and sampled requests in one batch, some with log-probabilities of prompt or output, some with none."""
    return [
        SamplingParams(
            max_tokens=n,
            ignore_eos=True,
            logprobs=(0, 2, 1)[i % 3],
            prompt_logprobs=(None, 0)[i % 2],
            **FILTERS[i % len(FILTERS)],
        )
        for i, n in enumerate(OUTPUTS)
    ]


def run(models: Models, name: str, layout: str, ranks: int, memory_bytes: int, config: dict[str, Any]) -> Result:
    batch = (random_prompts(LENGTHS, seed=3), params())
    folder = models.folder(name)
    return serve(folder, [batch], ranks=ranks, layout=layout, memory_bytes=memory_bytes, **config)[0]


def small_cache(
    models: Models, name: str, layout: str, ranks: int, pages: int, config: dict[str, Any]
) -> Result:
    """A run whose ranks hold `pages` pages each, or as many more as the longest request needs."""
    memory = memory_for(
        models.config(name),
        pages=pages,
        request_tokens=REQUEST_TOKENS,
        ranks=ranks,
        layout=layout,
        dtype="float64",
        **config,
    )
    return run(models, name, layout, ranks, memory, config)


@pytest.fixture(scope="session", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def baselines(models: Models) -> dict[str, list[Completion]]:
    """Every model on one rank: no cut, no preemption, no chunks."""
    config = {"page_tokens": 64, "max_batch_tokens": 1024, "max_running": 16, "plans_in_flight": 1}
    return {each: run(models, each, "tp", 1, 16 << 20, config).completions for each in NAMES}


def assert_same(got: Sequence[Completion], want: Sequence[Completion]) -> None:
    """Tokens, and every log-probability that was asked for."""
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine.tokens == theirs.tokens, (index, mine.error)
        assert (mine.finish, mine.error) == (theirs.finish, theirs.error)
        pairs = list(zip(entries(mine), entries(theirs), strict=True))
        assert all(a[0] == b[0] and a[1].token == b[1].token for a, b in pairs)
        assert max(abs(a[1].logprob - b[1].logprob) for a, b in pairs) < BOUND, index
        assert all([t for t, _ in a[1].top] == [t for t, _ in b[1].top] for a, b in pairs)


def test_the_baseline_is_the_model(models: Models, baselines: dict[str, list[Completion]], name: str) -> None:
    """Also for drawn tokens: the reference sampler knows whole rows of the vocabulary and nothing of shards."""
    assert worst_difference(models, name, baselines[name]) < 1e-8
    for completion, p in zip(baselines[name], params(), strict=True):
        check_tokens(models, name, completion, p)


def test_the_baseline_samples(baselines: dict[str, list[Completion]], name: str) -> None:
    """The likeliest token is not always the one drawn, or sampling would prove nothing."""
    drawn = [
        entry.logprob < entry.top[0][1]
        for completion, p in zip(baselines[name], params(), strict=True)
        if p.temperature and p.logprobs
        for entry in completion.logprobs
    ]
    assert sum(drawn) > 10, (sum(drawn), len(drawn))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    models: Models, baselines: dict[str, list[Completion]], layout: str, ranks: int
) -> None:
    """A cache that holds little more than the longest request, pages of 4 tokens, two plans in flight."""
    name = NAMES[(ranks + LAYOUTS.index(layout)) % len(NAMES)]
    config = {"page_tokens": 4, "max_batch_tokens": 24, "max_running": 8, "context_block_tokens": 16}
    result = small_cache(models, name, layout, ranks, 1, config)
    assert result.num_preempted > 0
    assert_same(result.completions, baselines[name])


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "page_tokens": st.sampled_from([4, 16, 64, 7]),
        "max_running": st.sampled_from([3, 8]),
        "max_batch_tokens": st.sampled_from([10, 33, 1024]),
        "plans_in_flight": st.sampled_from([1, 2]),
        "absorbed_tokens": st.sampled_from([1, 3, 1000]),
        "dop_absorbed_tokens": st.sampled_from([1, 3, 1000]),
        "context_block_tokens": st.sampled_from([3, 17, 64, 1024]),
    }
)
CASES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(NAMES),
    "layout": st.sampled_from(LAYOUTS),
    "ranks": st.sampled_from([2, 3, 4]),
    "pages": st.sampled_from([1, 8, 200]),
    "config": CONFIGURATIONS,
}
# The fixtures are read only; one example takes about half a second.
HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=HEALTH)
@given(**CASES)
def test_drawn_configurations(
    models: Models,
    baselines: dict[str, list[Completion]],
    name: str,
    layout: str,
    ranks: int,
    pages: int,
    config: dict[str, Any],
) -> None:
    result = small_cache(models, name, layout, ranks, pages, config)
    assert_same(result.completions, baselines[name])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=HEALTH)
@given(**CASES)
def test_many_drawn_configurations(
    models: Models,
    baselines: dict[str, list[Completion]],
    name: str,
    layout: str,
    ranks: int,
    pages: int,
    config: dict[str, Any],
) -> None:
    result = small_cache(models, name, layout, ranks, pages, config)
    assert_same(result.completions, baselines[name])
