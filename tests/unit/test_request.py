"""Requests and sampling parameters: what is refused, and with which words."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from splash_trt.request import (
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MAX_TOKEN_ID,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        *[("temperature", value) for value in (-0.1, 100.5, math.nan, math.inf, -math.inf)],
        ("top_k", -1),
        *[("top_p", value) for value in (0.0, -0.5, 1.01, math.nan)],
        *[("min_p", value) for value in (-0.01, 1.01, math.nan)],
        *[("seed", value) for value in (-1, 2**63)],
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (MAX_TOKEN_ID + 1,)),
        *[("min_tokens", value) for value in (-1, 17, 1.0, True)],
        *[(name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, math.nan, math.inf)],
        *[("repetition_penalty", value) for value in (0, -1.0, 0.001, 101, math.nan)],
        *[("logit_bias", {3: value}) for value in (-101, 100.5, math.nan, math.inf)],
        ("stop_token_ids", tuple(range(MAX_STOP_IDS + 1))),
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, MAX_LOGPROBS + 1)],
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    wrong: dict[str, Any] = {field: value}
    with pytest.raises(ValueError) as caught:
        SamplingParams(**wrong)
    text = str(caught.value)
    assert text.startswith(f"{field}: ") and repr(value) in text and "must be" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0.0),
        ("temperature", 100),
        ("top_k", 0),
        ("top_k", 10**12),
        ("top_p", 1),
        ("top_p", 5e-324),
        ("min_p", 0),
        ("min_p", 1),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("stop_token_ids", tuple(range(MAX_STOP_IDS))),
        *[("min_tokens", value) for value in (0, 16)],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2, 0.5, 2.0)],
        *[("repetition_penalty", value) for value in (0.01, 1, 100)],
        *[("logit_bias", value) for value in ({}, {0: -100}, {i: 100.0 for i in range(MAX_LOGIT_BIAS)})],
        ("grammar", Grammar(GrammarKind.REGEX, "x" * MAX_GRAMMAR_BYTES)),
        ("logprobs", 0),
        ("prompt_logprobs", MAX_LOGPROBS),
    ],
)
def test_the_ends_of_each_range_are_allowed(field: str, value: Any) -> None:
    right: dict[str, Any] = {field: value}
    assert getattr(SamplingParams(**right), field) == value


def test_unknown_fields_are_refused_on_the_wire() -> None:
    with pytest.raises(ValueError, match="tempratur"):
        msgspec.convert({"tempratur": 1.0}, SamplingParams)


def _request(prompt: tuple[int, ...] = (1,), name: str = "a", seed: int | None = None) -> Request:
    return Request(id=name, prompt=prompt, sampling=SamplingParams(seed=seed))


def test_a_seed_of_ones_own_or_one_of_the_ids() -> None:
    assert _request(seed=0).seed == 0 and _request(seed=2**63 - 1).seed == 2**63 - 1
    assert _request(name="a").seed == _request((5, 6), name="a").seed
    seeds = {_request(name=f"r{i}").seed for i in range(2000)}
    assert len(seeds) == 2000 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62 and min(seeds) < 2**61, "the hash does not fill the range"


def test_the_ids_seed_is_the_same_in_every_process() -> None:
    """It must survive a restart: Python's own hash of a string would not."""
    assert _request(name="a").seed == 1702698405120146464


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((), "at least one token"),
        ((0, 100), "100"),
        ((-5, 1), "-5"),
        ((2**64,), str(2**64)),
        ((1,) * 8, "8 tokens are too many; it must be at most 7 tokens"),
        ((1,) * 50, "50 tokens"),
    ],
)
def test_prompts_that_a_model_cannot_take(prompt: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"^prompt: .*{words}"):
        _request(prompt).check(vocab_size=100, max_context=8)


@pytest.mark.parametrize("prompt", [(0,), (99,), (1,) * 7])
def test_prompts_at_the_ends_of_what_a_model_takes(prompt: tuple[int, ...]) -> None:
    _request(prompt).check(vocab_size=100, max_context=8)


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_deadlines_are_positive(deadline: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        Request(id="a", prompt=(1,), sampling=SamplingParams(), deadline_s=deadline)


@pytest.mark.parametrize("priority", [2**31 + 1, -(2**31) - 1, 2**63])
def test_priorities_that_the_scheduler_cannot_keep_are_refused(priority: int) -> None:
    with pytest.raises(ValueError, match=f"priority: {priority} "):
        Request(id="a", prompt=(1,), sampling=SamplingParams(), priority=priority)


def test_a_token_id_is_a_whole_number() -> None:
    with pytest.raises(ValueError, match="prompt.*1.5"):
        Request(id="a", prompt=(1.5,), sampling=SamplingParams()).check(10, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5),
        ("top_k", 2.5),
        ("temperature", None),
        ("top_p", "x"),
        ("min_p", math.nan),
        ("seed", 1.0),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", "7"),
        ("presence_penalty", "1"),
        ("frequency_penalty", None),
        ("repetition_penalty", [1]),
        ("logit_bias", None),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {MAX_TOKEN_ID + 1: 2.0}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: True}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("grammar", "regex"),
        ("grammar", {"kind": "regex", "text": "a"}),
    ],
)
def test_sampling_parameters_of_the_wrong_type_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "a", "grammar.kind: 'regex' is not allowed; it must be one of json_object, json_schema, regex"),
        (GrammarKind.REGEX, None, "grammar.text: None"),
        (GrammarKind.REGEX, "a\ud800", "grammar.text: .* must be text without lone surrogates"),
        (GrammarKind.REGEX, "", "grammar.text: .* it must be empty for json_object, and not for the others"),
        (GrammarKind.JSON_OBJECT, "{}", "grammar.text: '{}' is not allowed; it must be empty for json_object"),
        (GrammarKind.LARK, "\u00e4" * (MAX_GRAMMAR_BYTES // 2 + 1), "grammar.text: 65538 bytes are too many"),
    ],
)
def test_a_wrong_grammar_is_refused_by_name(kind: Any, text: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Grammar(kind, text)


def test_a_grammar_says_where_the_text_ends() -> None:
    with pytest.raises(ValueError, match="ignore_eos: True is not allowed; it must be False beside a grammar"):
        SamplingParams(grammar=Grammar(GrammarKind.JSON_OBJECT), ignore_eos=True)


def test_a_bias_is_for_ids_of_the_model() -> None:
    sampling = SamplingParams(logit_bias={99: 1.0, 100: 1.0})
    with pytest.raises(ValueError, match="logit_bias: 100 is not allowed; it must be token ids from 0 to 99"):
        Request(id="a", prompt=(1,), sampling=sampling).check(vocab_size=100, max_context=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {0: 0.0}},
        {"min_tokens": 1},
        {"grammar": Grammar(GrammarKind.JSON_OBJECT)},
    ],
    ids=str,
)
def test_what_ranks_keep_state_for(changes: dict[str, Any]) -> None:
    assert SamplingParams(**changes).controlled and not SamplingParams(top_p=0.5, ignore_eos=True).controlled
    assert SamplingParams(**changes).penalised == any("penalty" in name for name in changes)
