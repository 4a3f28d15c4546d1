"""Ranks with little or nothing to do, and contexts that grow for long: against the oracle, with the step's own plans
as the witness that the case is the one meant."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import numpy as np
import pytest

from splash_trt.config import EngineConfig
from splash_trt.llm import LLM
from splash_trt.memory.map import memory_map
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Completion, SamplingParams, TokenDelta
from tests.layouts.harness import (
    LAYOUTS,
    MEMORY_BYTES,
    Models,
    Result,
    check_tokens,
    differences,
    greedy,
    random_prompts,
    rank_threads,
    serve,
    worst_difference,
)

BOUND = 1e-8


def idle_ranks(result: Result, ranks: int, prefill: bool) -> int:
    """Rank-steps without a token of their own: none computed here (DP, CP), no request owned (DOP).

    prefill: count steps that hold a prompt's tokens, else those of decodes alone.
    """
    total = 0
    for plan in result.plans:
        if bool((plan.start == 0).any()) == prefill:
            total += ranks - len(np.unique(plan.home)) if plan.layout.name == "DOP" else int((plan.counts == 0).sum())
    return total


@pytest.mark.parametrize(("layout", "ranks"), [*((layout, 3) for layout in LAYOUTS), ("dp", 4), ("cp", 2), ("dop", 4)])
def test_a_rank_with_nothing_to_do_takes_part(models: Models, layout: str, ranks: int) -> None:
    """One short request, then fewer requests than ranks, then some of which one outlives the others, on one world."""
    page = 16
    lengths, outputs = ((5,), (11, 3), (7, 2, 20, 9)), ((4,), (3, 5), (3, 2, 4, 7))
    batches = [
        (random_prompts(n, seed=i), [greedy(m, prompt_logprobs=0 if i else None) for m in outputs[i]])
        for i, n in enumerate(lengths)
    ]
    results = serve(models.folder("v3_base"), batches, ranks=ranks, layout=layout, page_tokens=page)
    for result, (_, params) in zip(results, batches, strict=True):
        assert worst_difference(models, "v3_base", result.completions) < BOUND
        for completion, p in zip(result.completions, params, strict=True):
            check_tokens(models, "v3_base", completion, p)
        if layout != "tp":
            assert idle_ranks(result, ranks, prefill=False) > 0
    if layout != "tp":
        assert idle_ranks(results[0], ranks, prefill=True) > 0
        last = results[-1].plans[-1]
        assert last.num_rows == 1 and len(np.flatnonzero(last.counts)) in (1, ranks)


@pytest.mark.parametrize(("layout", "ranks"), [("tp", 4), ("dp", 5), ("cp", 6), ("dop", 6)])
def test_fewer_tokens_than_ranks(models: Models, layout: str, ranks: int) -> None:
    """Prompts of one to three tokens, alone and together; nothing is a whole page."""
    prompts, params = random_prompts((1, 2, 3)), [greedy(1), greedy(2), greedy(3)]
    batches = [([prompts[0]], params[:1]), ([prompts[2]], params[1:2]), (prompts, params)]
    results = serve(models.folder("v3_half_rope"), batches, ranks=ranks, layout=layout, page_tokens=8)
    for result, (_, batch_params) in zip(results, batches, strict=True):
        for completion, p in zip(result.completions, batch_params, strict=True):
            assert worst_difference(models, "v3_half_rope", [completion]) < BOUND
            check_tokens(models, "v3_half_rope", completion, p)
    assert min(plan.num_tokens for plan in results[0].plans) < ranks


def check_long_decode(models: Models, layout: str, ranks: int, batch: int, tokens: int) -> None:
    """Every position's log-probabilities from the first generated token to the last, after `tokens` of them."""
    prompts = random_prompts([1 + 3 * i for i in range(batch)], seed=9)
    params = [greedy(tokens, logprobs=1)] * batch
    (result,) = serve(models.folder("v3_tied"), [(prompts, params)], ranks=ranks, layout=layout, page_tokens=4)
    decodes = [plan for plan in result.plans if (plan.start > 0).all() and plan.num_rows == batch]
    assert len(decodes) >= tokens - 2 and all(plan.absorbed.all() for plan in decodes)
    for completion in result.completions:
        found = differences(models, "v3_tied", completion)
        early, late = found[:20].max(), found[-20:].max()
        assert float(early) < BOUND and float(late) < BOUND and float(found.max()) < BOUND
        check_tokens(models, "v3_tied", completion, params[0])


@pytest.mark.parametrize(("ranks", "batch"), [(3, 1), (2, 8)])
def test_context_parallel_decode_does_not_drift(models: Models, ranks: int, batch: int) -> None:
    """Context parallelism alone splits a decode over ranks: each rank's stripe grows to tens of pages."""
    check_long_decode(models, "cp", ranks, batch, tokens=120 if batch == 1 else 80)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_decode_does_not_drift(models: Models, layout: str, ranks: int, batch: int) -> None:
    check_long_decode(models, layout, ranks, batch, tokens=500)


def test_no_rank_outlives_an_error(models: Models) -> None:
    before = rank_threads()
    with (
        pytest.raises(ValueError, match="prompt"),
        LLM(models.folder("v3_base"), ranks=3, layout="dop", memory_bytes=MEMORY_BYTES, dtype="float64") as llm,
    ):
        llm.generate([[1, 2], []])
    assert rank_threads() <= before


def test_no_rank_starts_for_a_layout_without_room(models: Models) -> None:
    """The layout that serves first fits; one that it may switch to does not."""
    folder, before = models.folder("v3_base"), rank_threads()
    sizes = memory_map(load_config(folder), EngineConfig(num_ranks=2, dtype="float64"), 0)
    memory = sizes.pages_offset + sizes.page_bytes
    with LLM(folder, ranks=2, layout="tp", dtype="float64", memory_bytes=memory):
        pass
    with pytest.raises(ValueError, match="memory_bytes: .* too small for layout dp on rank 0"):
        LLM(folder, ranks=2, layout="auto", dtype="float64", memory_bytes=memory)
    assert rank_threads() <= before


def test_a_failing_step_is_not_taken_for_a_wrong_prompt(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are in the middle of a step are sent nothing: the failure ends the run."""

    def fail(self: Orchestrator) -> NoReturn:
        raise ValueError("a bug")

    monkeypatch.setattr(Orchestrator, "step", fail)
    with LLM(models.folder("v3_base"), ranks=2, layout="tp", memory_bytes=MEMORY_BYTES, dtype="float64") as llm:
        sent: list[object] = []
        monkeypatch.setattr(type(llm._worker.world.control), "send_object", lambda self, value: sent.append(value))
        with pytest.raises(ValueError, match="a bug"):
            llm.generate([[1, 2]])
        assert not sent


def test_a_wrong_layout_is_told_all_that_there_are(models: Models) -> None:
    with pytest.raises(ValueError, match="^layout: 'xp' is not one of auto, tp, dp, cp, dop$"):
        LLM(models.folder("v3_base"), layout="xp")


def test_wrong_calls_are_named_and_change_nothing(models: Models) -> None:
    folder, params = models.folder("v3_base"), SamplingParams(max_tokens=2, temperature=0)
    with LLM(folder, ranks=2, layout="tp", memory_bytes=MEMORY_BYTES, dtype="float64") as llm:
        wrong_calls: list[tuple[str, Any, Any]] = [
            ("prompts: 1 is not a list of token ids", [1, 2], params),
            ("prompts: 'To be' is a text; give a list of token ids for each prompt, such as ", ["To be"], params),
            ("prompts: 'To be' is a text", "To be", params),
            ("prompts: 'To be' is a text", [[1], "To be"], params),
            ("sampling: {.*} is not a SamplingParams", [[1]], {"max_tokens": 2}),
            ("sampling: None is not a SamplingParams", [[1]], [None]),
            ("sampling: 1 for 2 prompts", [[1], [2]], [params]),
        ]
        for words, prompts, sampling in wrong_calls:
            with pytest.raises(ValueError, match=words):
                llm.generate(prompts, sampling)
        assert len(llm.generate([[1, 2]], params)[0].tokens) == 2
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1, 2]], params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": "2"}, "ranks: '2' is not a whole number from 1"),
        ({"ranks": None}, "ranks: None is not"),
        ({"ranks": 0}, "ranks: 0 is not"),
        ({"layout": None}, "layout: None is not one of"),
        ({"dummy_weights": "a"}, "dummy_weights: 'a' is not a seed"),
        ({"dummy_weights": -1}, "dummy_weights: -1 is not a seed"),
        ({"dummy_weights": True}, "dummy_weights: True is not a seed"),
    ],
)
def test_wrong_options_are_named_before_any_rank_starts(models: Models, options: dict[str, Any], words: str) -> None:
    before = rank_threads()
    with pytest.raises(ValueError, match=f"^{words}"):
        LLM(models.folder("v3_base"), memory_bytes=MEMORY_BYTES, dtype="float64", **options)
    assert rank_threads() <= before


def test_token_ids_are_whole_numbers_of_any_type(models: Models) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    with LLM(models.folder("v3_base"), memory_bytes=MEMORY_BYTES, dtype="float64") as llm:
        plain = llm.generate([[1, 2], [3, 4]], params)
        for prompts in (np.array([[1, 2], [3, 4]]), [np.array([1, 2], np.uint8), [np.int64(3), 4]]):
            found: Any = llm.generate(prompts, params)  # type: ignore[arg-type]
            assert [(one.prompt, one.tokens) for one in found] == [(one.prompt, one.tokens) for one in plain]
            assert all(type(token) is int for one in found for token in one.prompt)
        for token in (True, np.True_, 1.0, np.float32(1), None, "1", np.array([1, 2])):
            with pytest.raises(ValueError, match="^prompt: .* is not allowed; it must be token ids from 0 to"):
                llm.generate([[1, token]], params)  # type: ignore[list-item]
        prompts: Any
        for prompts in (None, ([1] for _ in range(2)), 7):
            with pytest.raises(ValueError, match="^prompts: .* is not a list; give a list of prompts"):
                llm.generate(prompts, params)


def test_a_second_thread_in_generate_is_told_so(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, step = threading.Event(), threading.Event(), Orchestrator.step

    def wait(self: Orchestrator) -> list[TokenDelta]:
        inside.set()
        assert go_on.wait(60)
        return step(self)

    monkeypatch.setattr(Orchestrator, "step", wait)
    params = SamplingParams(max_tokens=2, temperature=0)
    with LLM(models.folder("v3_base"), memory_bytes=MEMORY_BYTES, dtype="float64") as llm:
        answers: list[Completion] = []
        first = threading.Thread(target=lambda: answers.extend(llm.generate([[1, 2]], params)))
        first.start()
        try:
            assert inside.wait(60)
            with pytest.raises(RuntimeError, match="another thread is in generate"):
                llm.generate([[1, 2]], params)
        finally:
            go_on.set()
            first.join(60)
        assert [one.tokens for one in answers] == [one.tokens for one in llm.generate([[1, 2]], params)]


def test_a_rank_that_calls_more_often_than_rank_0_is_told(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(models.folder("v3_base"), layout="tp", memory_bytes=MEMORY_BYTES, dtype="float64") as llm:
        rank_0 = llm.orchestrator
        monkeypatch.setattr(llm, "orchestrator", None)
        monkeypatch.setattr(llm._worker, "follow", lambda: None)
        with pytest.raises(RuntimeError, match="rank 0 has closed"):
            llm.generate([[1, 2]])
        monkeypatch.setattr(llm, "orchestrator", rank_0)
