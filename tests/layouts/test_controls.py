"""Sampling's controls in every layout: the same tokens on any number of ranks, through preemptions and switches.

The baseline is one rank with a cache that holds it all; it is compared with transformers' logits, to which the controls
are applied row by row.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import regex
import torch
from tokenizers import Tokenizer

from splash_trt.config import Layout
from splash_trt.llm import LLM
from splash_trt.request import Completion, FinishReason, Grammar, GrammarKind, SamplingParams
from tests.layouts.harness import MEMORY_BYTES, Models, Result, gumbel, memory_for, random_prompts, serve
from tests.unit.controls_cases import write_tokenizer

NAME = "controlled"
BASE = "v3_half_rope"
LENGTHS = (5, 14, 1, 9, 20, 3, 17, 4, 12, 8)
REGEX = "[a-f]{2}( [0-9]{1,3}){3,6}"
WORDS = Grammar(GrammarKind.REGEX, REGEX)
END = 1
ENDS = (END, 7)  # the model has two

KINDS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 2.0, "temperature": 0.5},
    {"frequency_penalty": 1.5, "temperature": 0.0},
    {"repetition_penalty": 1.7, "temperature": 0.0},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.3, "top_p": 0.7},
    {"logit_bias": {3: 30.0, 4: 29.0, 5: -100.0}, "temperature": 2.0},
    {"logit_bias": {END: 100.0, 7: 99.0, 9: 98.0}, "min_tokens": 6, "stop_token_ids": (9,), "temperature": 3.0},
    {"grammar": WORDS},
    {"grammar": WORDS, "temperature": 0.0, "logit_bias": {END: 40.0}, "min_tokens": 14},
    {"grammar": WORDS, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "top_k": 30},
    {},
)


def params() -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=22,
            seed=i,
            logprobs=0,
            **{"ignore_eos": "grammar" not in kind and "min_tokens" not in kind, **kind},
        )
        for i, kind in enumerate(KINDS)
    ]


@pytest.fixture(scope="session")
def folder(models: Models) -> Path:
    """A model with a vocabulary of bytes."""
    models.derive(NAME, BASE)
    path = models.folder(NAME)
    write_tokenizer(path, 256, end=END)
    return path


def run(folder: Path, layout: str, ranks: int, **config: Any) -> Result:
    return serve(folder, [(random_prompts(LENGTHS, seed=3), params())], ranks=ranks, layout=layout, **config)[0]


@pytest.fixture(scope="session")
def baseline(folder: Path) -> list[Completion]:
    return run(folder, "tp", 1, plans_in_flight=1).completions


def adjusted(logits: torch.Tensor, p: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]) -> torch.Tensor:
    """The formulas of OpenAI's and transformers' documents, for requests without a grammar."""
    x = logits.clone()
    if len(output) < p.min_tokens:
        x[[*ENDS, *p.stop_token_ids]] = -torch.inf
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= count * p.frequency_penalty + p.presence_penalty
    return x


def test_the_baseline_is_the_model(models: Models, folder: Path, baseline: list[Completion]) -> None:
    for completion, p in zip(baseline, params(), strict=True):
        if p.grammar is not None or p.top_p < 1:
            continue
        prompt, tokens = completion.prompt, completion.tokens
        rows = models.oracle(NAME).logits([*prompt, *tokens])[len(prompt) - 1 :]
        for i, token in enumerate(tokens):
            x = adjusted(rows[i], p, prompt, tokens[:i])
            if p.temperature:
                noise = [gumbel(p.seed or 0, len(prompt) + i, j) for j in range(len(x))]
                x = x / p.temperature + torch.tensor(noise, dtype=torch.float64)
            assert int(x.argmax()) == token, (p, i)


def test_the_baseline_obeys(folder: Path, baseline: list[Completion]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for completion, p in zip(baseline, params(), strict=True):
        if p.grammar is not None:
            ended = completion.finish is FinishReason.STOP
            text, pattern = tokenizer.decode(completion.tokens[: -1 if ended else None]), regex.compile(REGEX)
            assert ended == (completion.tokens[-1] in ENDS) and pattern.fullmatch(text, partial=not ended), text
            assert ended or len(completion.tokens) == 22
        if p.min_tokens:
            assert len(completion.tokens) >= p.min_tokens
    bound = next(c for c, p in zip(baseline, params(), strict=True) if p.stop_token_ids)
    assert bound.finish is FinishReason.STOP and len(bound.tokens) == 7, "the bias ends it as soon as it may"


def assert_same(got: list[Completion], want: list[Completion]) -> None:
    for mine, theirs, p in zip(got, want, params(), strict=True):
        assert (mine.tokens, mine.finish, mine.error) == (theirs.tokens, theirs.finish, theirs.error), p
        a, b = ([entry.logprob for entry in c.logprobs] for c in (mine, theirs))
        np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize(("layout", "ranks"), [("tp", 2), ("dp", 3), ("cp", 4), ("dop", 2)])
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    models: Models, folder: Path, baseline: list[Completion], layout: str, ranks: int
) -> None:
    """Chunked prefills, a cache for little more than one request, two plans in flight."""
    config: dict[str, Any] = {"page_tokens": 4, "max_batch_tokens": 12, "max_running": 8, "context_block_tokens": 16}
    sizes = {"ranks": ranks, "layout": layout, "dtype": "float64", **config}
    memory = memory_for(models.config(NAME), pages=1, request_tokens=max(LENGTHS) + 22, **sizes)
    result = run(folder, layout, ranks, memory_bytes=memory, **config)
    again = [entry for plan in result.plans for entry in plan.slot_controls if entry.output]
    assert len(again) > 3 and any(entry.grammar for entry in again) and any(entry.penalties for entry in again)
    assert_same(result.completions, baseline)


@pytest.mark.parametrize("ranks", [2, 3])
def test_switches_change_no_token(folder: Path, baseline: list[Completion], ranks: int) -> None:
    """Through all layouts while the requests run."""
    ways = [Layout.DOP, Layout.CP, Layout.DP, Layout.TP, Layout.DP, Layout.DOP]
    config: dict[str, Any] = {
        "dtype": "float64",
        "memory_bytes": MEMORY_BYTES,
        "max_batch_tokens": 40,
        "max_running": 8,
    }
    with LLM(folder, ranks=ranks, layout="tp", layouts=tuple(Layout), **config) as llm:
        assert llm.orchestrator is not None
        scheduler = llm.orchestrator.scheduler
        schedule, epochs = scheduler.schedule, set()

        def scheduled(now: float = 0.0) -> Any:
            if not scheduler.switcher.busy and ways:
                scheduler.switch(ways.pop(0), "a test")
            plan = schedule(now)
            if plan is not None and plan.num_tokens:
                epochs.add(plan.epoch)
            return plan

        with patch.object(scheduler, "schedule", scheduled):
            completions = llm.generate(random_prompts(LENGTHS, seed=3), params())
    assert len(epochs) > 3, epochs
    assert_same(completions, baseline)


def test_a_grammar_is_refused_before_any_request_runs(models: Models, folder: Path) -> None:
    with LLM(folder, ranks=2, layout="tp", dtype="float64", memory_bytes=MEMORY_BYTES) as llm:
        wrong = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "("))
        with pytest.raises(ValueError, match="grammar: this regex does not compile: .*unclosed"):
            llm.generate([[1], [2]], [SamplingParams(), wrong])
        good = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "ab"), max_tokens=5)
        assert len(llm.generate([[1]], good)[0].tokens) == 3
    with LLM(models.folder(BASE), layout="tp", dtype="float64", memory_bytes=MEMORY_BYTES) as llm:
        with pytest.raises(ValueError, match="grammar: this deployment has no tokenizer.json"):
            llm.generate([[1]], good)


def test_a_grammar_that_dies_ends_its_request_alone(folder: Path) -> None:
    """The vocabulary lacks the last byte of U+00AD: nothing can follow the one before it."""
    grammar = Grammar(GrammarKind.REGEX, "[ab]{2,9}\u00ad")
    sampling = [SamplingParams(max_tokens=40, grammar=grammar), SamplingParams(max_tokens=40)]
    with LLM(folder, ranks=2, layout="dop", dtype="float64", memory_bytes=MEMORY_BYTES) as llm:
        dead, alive = llm.generate([[1], [2]], sampling)
        assert llm.orchestrator is not None
        llm.orchestrator.scheduler.check_idle()
    assert dead.finish is FinishReason.ERROR and 3 <= len(dead.tokens) <= 10
    assert dead.error == "grammar: nothing in the model's vocabulary can continue it"
    assert alive.finish is not FinishReason.ERROR
