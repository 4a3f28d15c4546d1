"""The API as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from splash_trt.frontend.tokenizer import Tokenizer
from tests.frontend.fake_engine import FakeEngine
from tests.frontend.servers import FrontendProcess, wait_until

TEXT = "The dog jumps over the fox: caf\u00e9, \u20ac5, \U0001f600!"


@pytest.fixture
def client(server: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    answer = client.completions.create(model="echo", prompt=TEXT, max_tokens=num_tokens)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "length")
    assert answer.object == "text_completion" and answer.model == "echo"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_tokens, num_tokens)
    assert answer.usage.total_tokens == 2 * num_tokens
    assert answer._request_id == answer.id and answer.id.startswith("cmpl-")


def test_completion_has_16_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt=TEXT)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_streamed_completion(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode(TEXT))
    options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": True}
    stream = client.completions.create(
        model="echo", prompt=TEXT, max_tokens=num_tokens, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == TEXT
    assert len(chunks) > 3 and not any("\ufffd" in c.choices[0].text for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens
    assert len({c.id for c in chunks}) == 1


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["one", "two two", "and three"]
    answer = client.completions.create(model="echo", prompt=prompts, max_tokens=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert all(c.text.startswith(p[:2]) for c, p in zip(answer.choices, prompts, strict=True))
    texts = ["", "", ""]
    for chunk in client.completions.create(model="echo", prompt=prompts, max_tokens=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in answer.choices]


def test_token_ids_as_prompts(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog")
    one = client.completions.create(model="echo", prompt=ids, max_tokens=len(ids))
    assert one.choices[0].text == "the lazy dog"
    two = client.completions.create(model="echo", prompt=[ids, ids[:1]], max_tokens=len(ids))
    assert two.choices[0].text == "the lazy dog"
    assert two.choices[1].text == len(ids) * tokenizer.token_name(ids[0])


def test_chat(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    before = len(engine.submitted)
    answer = client.chat.completions.create(model="echo", messages=messages, max_completion_tokens=12)
    prompt = engine.submitted[before].prompt
    expected = "<|begin|><|system|>Be brief.\n<|user|>Hello\n<|assistant|>"
    assert "".join(tokenizer.token_name(t) for t in prompt) == expected
    assert prompt[0] == 0 and prompt[-1] == 3  # special tokens, once each
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content and "Be brief."[:4] in choice.message.content
    again = [*messages, choice.message.model_dump(), {"role": "user", "content": "And?"}]
    client.chat.completions.create(model="echo", messages=again, max_tokens=1)  # type: ignore[arg-type]
    chunks = list(client.chat.completions.create(model="echo", messages=messages, max_tokens=12, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_may_use_the_rest_of_the_context(client: openai.OpenAI, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    message: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "Hello <|end|>"}
    answer = client.chat.completions.create(model="echo", messages=[message])
    request = engine.submitted[before]
    assert request.sampling.max_tokens == 4096 - len(request.prompt)
    assert answer.choices[0].finish_reason == "stop"  # the echoed end-of-text token
    assert answer.choices[0].message.content == "Hello "


def test_sampling_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    more = {"top_k": 7, "min_p": 0.25, "ignore_eos": True, "stop_token_ids": [9, 8]}
    client.completions.create(
        model="echo", prompt="x", max_tokens=2, temperature=0.5, top_p=0.75, seed=11, extra_body=more
    )
    sampling = engine.submitted[before].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.75, 11, 2)
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos) == (7, 0.25, True)
    assert sampling.stop_token_ids == (9, 8) and sampling.logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    text = "abcdefg \u20ac hij"
    for stop, expected in (("def", "abc"), (["zz", "g \u20ac"], "abcdef"), (["q"], None), ("abcx", None)):
        num_tokens = 20 if expected is None else 3000
        answer = client.completions.create(model="echo", prompt=text, max_tokens=num_tokens, stop=stop, stream=stream)
        if isinstance(answer, openai.Stream):
            chunks = list(answer)
            got = "".join(c.choices[0].text for c in chunks)
            finish = [c.choices[0].finish_reason for c in chunks][-1]
        else:
            got, finish = answer.choices[0].text, answer.choices[0].finish_reason
        if expected is None:
            assert got.startswith(text) and finish == "length"
        else:
            assert (got, finish) == (expected, "stop")
            wait_until(lambda: engine.submitted[-1].id in engine.cancelled)


def test_stop_token_is_not_shown(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("xyz!")
    stop = {"stop_token_ids": [ids[2]], "return_token_ids": True}
    answer = client.completions.create(model="echo", prompt=ids, max_tokens=9, extra_body=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("xy", "stop")
    assert answer.choices[0].model_extra == {"token_ids": ids[:3]}


def test_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\u20acb")  # the euro sign is three tokens, none of them text
    answer = client.completions.create(model="echo", prompt=ids, max_tokens=5, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert logprobs.token_logprobs == [-0.5] * 5 and logprobs.text_offset == [0, 1, 1, 1, 2]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 5 and logprobs.top_logprobs[0]["a"] == -0.5
    chat = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "a\u20ac"}], max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None and [c.token for c in content[2:]] == ["a", "bytes:\\xe2"]
    assert content[3].bytes == [0xE2] and [len(c.top_logprobs) for c in content] == [3] * 4
    streamed = client.completions.create(model="echo", prompt=ids, max_tokens=5, logprobs=0, stream=True)
    tokens = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens or []]
    assert tokens == logprobs.tokens


def test_token_ids_without_text(server: FrontendProcess, tokenizer: Tokenizer) -> None:
    """As load generators ask: every token is counted in the stream, and none is turned into text."""
    ids = tokenizer.encode("the lazy dog")
    body = {"prompt": ids, "max_tokens": 50, "stream": True, "return_token_ids": True, "detokenize": False}
    choices = [event["choices"][0] for event in server.ask("POST", "/v1/completions", body).events]
    assert [token for choice in choices for token in choice["token_ids"]] == (ids * 50)[:50]
    assert {choice["text"] for choice in choices} == {""}
    shown = server.ask("POST", "/v1/completions", {**body, "detokenize": True, "stop": "g"}).events
    assert "".join(event["choices"][0]["text"] for event in shown) == "the lazy do"
    assert [token for event in shown for token in event["choices"][0]["token_ids"]] == ids


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").model_extra == {"max_model_len": 4096}


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="echo", prompt="x", temperature=-1)
    assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt="x")
    assert unknown.value.code == "model_not_found"


def test_100_clients_at_once(server: FrontendProcess, tokenizer: Tokenizer) -> None:
    prompts = [f"client {number} says \u20ac{number}" for number in range(100)]

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
        num_tokens = len(tokenizer.encode(prompt))
        if not stream:
            whole = await client.completions.create(model="echo", prompt=prompt, max_tokens=num_tokens)
            return whole.choices[0].text
        chunks = await client.completions.create(model="echo", prompt=prompt, max_tokens=num_tokens, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, n % 2 == 0) for n, prompt in enumerate(prompts)))

    assert asyncio.run(ask_all()) == prompts
