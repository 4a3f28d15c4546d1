"""Promises of the API that a stand-in for the engine cannot keep, with the demo model on two ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from splash_trt.frontend.sampling import choice_seed
from tests.e2e.servers import Server

pytestmark = pytest.mark.mpi

NAME = "splash-tiny"
TEXT = "ROMEO.\nBut soft, what light through yonder window breaks?\n"
USER: Any = [{"role": "user", "content": "Romeo"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ROMEO", "JULIET"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_n(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model=NAME, prompt=TEXT, max_tokens=6, temperature=0.9)
    texts = [choice.text for choice in client.completions.create(**asked, n=3, seed=5).choices]
    assert len(set(texts)) == 3
    alone = [client.completions.create(**asked, seed=choice_seed(5, i)).choices[0].text for i in range(3)]
    assert texts == alone


def test_echo_tells_the_log_probabilities_that_generating_told(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model=NAME, temperature=0, logprobs=2, extra_body={"return_token_ids": True})
    said = client.completions.create(prompt=TEXT, max_tokens=10, **asked).choices[0]
    ids = client.post("/../tokenize", body={"prompt": TEXT}, cast_to=dict[str, Any])["tokens"]
    all_ids = [*ids, *said.token_ids]  # type: ignore[attr-defined]
    echoed = client.completions.create(prompt=all_ids, max_tokens=0, echo=True, **asked).choices[0]
    assert said.logprobs is not None and echoed.logprobs is not None
    assert echoed.text == TEXT + said.text
    assert said.logprobs.token_logprobs and echoed.logprobs.token_logprobs and echoed.logprobs.text_offset
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[-10:] == pytest.approx(said.logprobs.token_logprobs, abs=1e-9)
    assert echoed.logprobs.text_offset[-10] == len(TEXT)
    # Greedy: what was chosen is the likeliest.
    tops = said.logprobs.top_logprobs or []
    assert [max(top.values()) for top in tops] == said.logprobs.token_logprobs


def test_stop_strings_across_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model=NAME, prompt=TEXT, max_tokens=16, temperature=0)
    whole = client.completions.create(**asked, logprobs=0).choices[0]
    assert whole.logprobs is not None and whole.logprobs.text_offset is not None
    border = whole.logprobs.text_offset[9]  # the stop string begins before a token's end and ends after it
    stop = whole.text[border - 2 : border + 2]
    expected = whole.text[: whole.text.index(stop)]
    stopped = client.completions.create(**asked, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(**asked, stop=[stop, "no such text"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_json_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    asked: dict[str, Any] = dict(model=NAME, messages=USER, n=2, seed=1, temperature=0.3, response_format=form)
    texts, finishes = ["", ""], list[str]()
    for chunk in client.chat.completions.create(**asked, max_tokens=200, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert finishes == ["stop", "stop"], texts
    print("written:", texts)
    for person in map(json.loads, texts):
        assert person.keys() == {"name", "age"} and person["name"] in ("ROMEO", "JULIET") and 1 <= person["age"] <= 99


def test_other_forms(client: openai.OpenAI) -> None:
    def say(**form: Any) -> str:
        asked: dict[str, Any] = dict(model=NAME, prompt=TEXT, max_tokens=100, seed=2)
        return client.completions.create(**asked, extra_body=form).choices[0].text

    assert re.fullmatch("[0-9]{3}-[a-f]{2}", say(guided_regex="[0-9]{3}-[a-f]{2}"))
    assert say(guided_choice=["so be it", "never (ever)"]) in ("so be it", "never (ever)")
    assert say(structured_outputs={"grammar": 'start: "ay" | "nay"'}) in ("ay", "nay")
    with pytest.raises(openai.BadRequestError) as refused:
        say(guided_regex="(a")
    assert refused.value.param == "guided_regex"


def test_sampling_controls(client: openai.OpenAI) -> None:
    more = {"return_token_ids": True, "ignore_eos": True}
    asked: dict[str, Any] = dict(model=NAME, prompt=TEXT, max_tokens=6, temperature=0)
    biased = client.completions.create(**asked, logit_bias={"42": 100}, extra_body=more).choices[0]
    assert biased.token_ids == [42] * 6  # type: ignore[attr-defined]
    free = client.completions.create(**asked, extra_body=more).choices[0].token_ids  # type: ignore[attr-defined]
    stopped = {**more, "stop_token_ids": [free[0]]}
    assert len(client.completions.create(**asked, extra_body=stopped).choices[0].token_ids) == 1  # type: ignore[attr-defined]
    late = {**stopped, "min_tokens": 4}
    ids = client.completions.create(**asked, extra_body=late).choices[0].token_ids  # type: ignore[attr-defined]
    assert len(ids) >= 4 and free[0] not in ids[:4]


def test_what_the_checkpoint_says_holds_where_a_request_says_nothing(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model=NAME, prompt=TEXT, max_tokens=12, seed=9)
    unsaid = client.completions.create(**asked).choices[0].text
    assert unsaid == client.completions.create(**asked, temperature=0.8, top_p=0.95).choices[0].text
    assert unsaid != client.completions.create(**asked, temperature=5, top_p=1).choices[0].text


def test_why_the_layout_is_what_it_is(server: Server) -> None:
    reply = server.ask("GET", "/v1/layout?explain=1")
    assert reply.status == 200, reply.data
    assert isinstance(reply.json["explain"], dict) and reply.json["layout"] in reply.json["layouts"]
