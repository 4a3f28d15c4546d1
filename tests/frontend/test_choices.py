"""What OpenAI's API offers beside plain text: several answers, echoes, log-probabilities, forms, token counts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from splash_trt.frontend.sampling import choice_seed
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.request import Grammar, GrammarKind
from tests.frontend.conftest import TEMPLATE, make_tokenizer
from tests.frontend.fake_engine import FakeEngine
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "Hello"}]
TEXT = "caf\u00e9, \u20ac5"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def client(server: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_n_answers_with_seeds_of_their_own(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    before = len(engine.submitted)
    answer = client.completions.create(model="echo", prompt=["one", "two"], n=3, max_tokens=2, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text[:2] for choice in answer.choices] == ["on"] * 3 + ["tw"] * 3
    seeds = [request.sampling.seed for request in engine.submitted[before:]]
    assert seeds[:3] == seeds[3:] == [choice_seed(7, i) for i in range(3)] and seeds[0] == 7 and len(set(seeds)) == 3
    num_prompt = len(tokenizer.encode("one")) + len(tokenizer.encode("two"))
    assert answer.usage is not None  # a prompt counts once
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 12)
    before = len(engine.submitted)
    client.completions.create(model="echo", prompt="one", n=2, best_of=2, max_tokens=1)
    unseeded = engine.submitted[before:]
    assert [request.sampling.seed for request in unseeded] == [None, None]
    assert unseeded[0].seed != unseeded[1].seed


def test_n_chats_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="echo", messages=USER, n=3, max_tokens=9)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="echo", messages=USER, n=3, max_tokens=9, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and texts[0]


def test_async_stream_of_n(server: FrontendProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            texts = ["", ""]
            stream = await client.chat.completions.create(model="echo", messages=USER, n=2, max_tokens=8, stream=True)
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            return texts

    first, second = asyncio.run(ask())
    assert first == second and first


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    asked: dict[str, Any] = {"model": "echo", "prompt": TEXT, "echo": True, "max_tokens": num_tokens, "stop": "5c"}
    answer = client.completions.create(**asked, stream=stream)
    if isinstance(answer, openai.Stream):
        assert "".join(chunk.choices[0].text for chunk in answer) == 2 * TEXT
    else:
        assert answer.choices[0].text == 2 * TEXT  # "5c" spans the border, where no stop string counts
        assert answer.usage is not None and answer.usage.completion_tokens == num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode(TEXT)
    before = len(engine.submitted)
    asked: dict[str, Any] = {"model": "echo", "prompt": TEXT, "echo": True, "max_tokens": 2, "logprobs": 1}
    answer = client.completions.create(**asked, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in ([answer] if not isinstance(answer, openai.Stream) else answer)]
    sampling = engine.submitted[before].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 1)
    tokens = [t for part in parts if part for t in part.tokens or []]
    values = [v for part in parts if part for v in part.token_logprobs or []]
    offsets = [o for part in parts if part for o in part.text_offset or []]
    top = [t for part in parts if part for t in part.top_logprobs or []]
    assert tokens == [tokenizer.token_name(token) for token in [*ids, *ids[:2]]]
    assert values == [None, *[-0.5] * (len(ids) + 1)] and top[0] is None and top[1] == {tokens[1]: -0.5}
    assert offsets[: len(ids)] == [len(bytes_before(tokenizer, ids[:i])) for i in range(len(ids))]
    assert offsets[len(ids) :] == [len(TEXT), len(TEXT) + 1]


def bytes_before(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Whole characters of the first tokens."""
    return b"".join(tokenizer.token_bytes(token) for token in ids).decode(errors="ignore")


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_echo_alone(server: FrontendProcess, tokenizer: Tokenizer, logprobs: int | None) -> None:
    body = {"prompt": TEXT, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = server.ask("POST", COMPLETIONS, body).json
    choice = answer["choices"][0]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(TEXT))
    streamed = server.ask("POST", COMPLETIONS, {**body, "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in streamed) == TEXT


def test_prompt_logprobs(server: FrontendProcess, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    body = {"prompt": "the fox", "max_tokens": 1, "prompt_logprobs": 2, "echo": True, "logprobs": 0}
    choice = server.ask("POST", COMPLETIONS, body).json["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for token, entry in zip(ids[1:], others, strict=True):
        assert entry[str(token)] == {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_name(token)}
        assert len(entry) == 2
    assert [len(top or "x") for top in choice["logprobs"]["top_logprobs"]] == [1] * (len(ids) + 1)
    chat = server.ask("POST", CHAT, {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0}).json
    assert chat["prompt_logprobs"][0] is None and chat["usage"]["prompt_tokens"] == len(chat["prompt_logprobs"])


def test_usage_in_streams(server: FrontendProcess) -> None:
    body = {"prompt": [7, 8, 9], "max_tokens": 4, "stream": True, "return_token_ids": True}
    always = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = server.ask("POST", COMPLETIONS, always).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 4 and events[-1]["choices"] == []
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}
    events = server.ask("POST", COMPLETIONS, {**body, "stream_options": {"include_usage": True}}).events
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1) and events[-1]["usage"]
    assert "usage" not in server.ask("POST", COMPLETIONS, body).events[-1]


def test_more_sampling_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    client.completions.create(
        model="echo", prompt="x", max_tokens=9, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"9": -100},
        extra_body={"min_tokens": 3, "repetition_penalty": 1.5},
    )  # fmt: skip
    sampling = engine.submitted[before].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert sampling.logit_bias == {9: -100} and sampling.min_tokens == 3


def test_stop_strings_may_be_kept(client: openai.OpenAI) -> None:
    more = {"include_stop_str_in_output": True}
    answer = client.completions.create(model="echo", prompt="abcdef", max_tokens=99, stop=["de"], extra_body=more)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcde", "stop")


def test_special_tokens_may_be_shown(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "echo", "prompt": "a<|user|>b", "max_tokens": 3}
    assert client.completions.create(**asked).choices[0].text == "ab"
    shown = client.completions.create(**asked, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text == "a<|user|>b"


FORMS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ),
    ({"response_format": {"type": "regex", "regex": "[a-z]+"}}, Grammar(GrammarKind.REGEX, "[a-z]+")),
    ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))),
    ({"guided_regex": "a|b"}, Grammar(GrammarKind.REGEX, "a|b")),
    ({"guided_choice": ["a.b", "c d"]}, Grammar(GrammarKind.REGEX, r"(a\.b)|(c d)")),
    ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar(GrammarKind.REGEX, "(a)")),
    ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT)),
]


@pytest.mark.parametrize(("form", "grammar"), FORMS)
def test_forms_of_answers(server: FrontendProcess, engine: FakeEngine, form: dict[str, Any], grammar: Grammar) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        before = len(engine.submitted)
        answer = server.ask("POST", path, {**body, **form, "max_tokens": 2})
        assert answer.status == 200, answer.data
        assert engine.submitted[before].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),  # looks ahead
        ({"guided_grammar": "start: b"}, "guided_grammar"),
        ({"structured_outputs": {"json": {"type": "objct"}}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_forms_that_do_not_compile(
    server: FrontendProcess, engine: FakeEngine, form: dict[str, Any], param: str
) -> None:
    before = len(engine.submitted)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        answer = server.ask("POST", path, {**body, **form})
        assert answer.status == 400 and answer.json["error"]["param"] == param, answer.data
        assert answer.json["error"]["message"].startswith(f"{param}: this ")
    assert len(engine.submitted) == before


def test_forms_need_no_files_once_the_frontend_serves(shared: tuple[FakeEngine, str], tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, TEMPLATE)
    server = wait_until_ready(start_frontend(shared[1], "--tokenizer", str(folder), "--keep-engine"))
    try:
        (folder / "tokenizer.json").unlink()
        answer = server.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "guided_regex": "a|b"})
        assert answer.status == 200, answer.data
    finally:
        server.end()


@pytest.mark.parametrize("texts", [["a.b", "c*d", "<e>", "f#g & h-i~j", "k/l\\m\n\u20ac[]{}^$|?+()"]])
def test_choices_mean_exactly_their_texts(server: FrontendProcess, engine: FakeEngine, texts: list[str]) -> None:
    assert server.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "guided_choice": texts}).status == 200
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar is not None and all(re.fullmatch(grammar.text, text) for text in texts)
    assert not any(re.fullmatch(grammar.text, text) for text in ("aXb", "cd", "ccd", "e"))


def test_pydantic_models_as_forms(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    model = pydantic.create_model("Weather", city=(str, ...), degrees=(int, ...))
    engine.script = (*tokenizer.encode('{"city": "K\u00f6ln", "degrees": 7}'), 1)
    try:
        answer = client.chat.completions.parse(model="echo", messages=USER, response_format=model)
    finally:
        engine.script = None
    assert answer.choices[0].message.parsed == model(city="K\u00f6ln", degrees=7)
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["city", "degrees"]
