"""Tool calls and reasoning over HTTP, in the formats of two families of models, from an engine that answers as told."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from splash_trt.frontend.chat_template import ChatTemplate
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.frontend.tools import deepseek, glm
from splash_trt.request import GrammarKind
from tests.frontend.conftest import make_tokenizer
from tests.frontend.fake_engine import EOS, FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
USER: Any = [{"role": "user", "content": "Sunny?"}]

# As the models' own templates do it, in few words: GLM wants arguments as objects, DeepSeek as text.
GLM_TEMPLATE = """{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>\
{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\
{{ call.function.name }}\
{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}\
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\
{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}"""
DEEPSEEK_TEMPLATE = (
    """{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for m in messages %}\
<|{{ m['role'] }}|>{% if m['content'] is not none %}{{ m['content'] }}{% endif %}{% for call in m.tool_calls or [] %}"""
    + deepseek.CALL_BEGIN
    + "{{ call['function']['name'] + '"
    + deepseek.SEPARATOR
    + """' + call['function']['arguments'] }}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
)


@dataclass
class Family:
    engine: FakeEngine
    server: FrontendProcess
    tokenizer: Tokenizer
    folder: Path
    call: str
    """The text of one call of `weather` for two days in a city with quotes in its name."""

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    def will_say(self, text: str) -> None:
        self.engine.script = (*self.tokenizer.encode(text, add_special_tokens=False), EOS)

    def prompt(self, index: int = -1) -> str:
        return "".join(self.tokenizer.token_name(token) for token in self.engine.submitted[index].prompt)


@pytest.fixture(scope="module", params=["glm", "deepseek"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "glm":
        make_tokenizer(folder, GLM_TEMPLATE, special=glm.MARKERS[:2], added=[*glm.MARKERS[2:], "<think>", "</think>"])
        call = (
            '<tool_call>weather\n<arg_key>city</arg_key><arg_value>K\u00f6ln "x"</arg_value>\n<arg_key>days</arg_key>'
            "<arg_value>2</arg_value></tool_call>"
        )
    else:
        tags = (deepseek.CALLS_BEGIN, deepseek.CALLS_END, deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.SEPARATOR)
        make_tokenizer(folder, DEEPSEEK_TEMPLATE, special=tags)
        arguments = '{"city": "K\u00f6ln \\"x\\"", "days": 2}'
        begin, end, call_begin, call_end, separator = tags
        call = f"{begin}{call_begin}weather{separator}{arguments}{call_end}{end}"
    with tempfile.TemporaryDirectory(prefix="splash-") as sockets:
        engine = FakeEngine(f"ipc://{sockets}/link", ready_message(400))
        engine.start()
        server = wait_until_ready(start_frontend(f"ipc://{sockets}/link", "--tokenizer", str(folder)))
        yield Family(engine, server, Tokenizer(folder), folder, call)
        server.end()
        engine.stop()


ARGUMENTS = {"city": 'K\u00f6ln "x"', "days": 2}


def joined(stream: Any) -> tuple[str, list[dict[str, str]], str]:
    """(content, calls, finish reason) of a stream's chunks; each chunk's part must be whole."""
    content, calls, finish = "", list[dict[str, str]](), ""
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                if delta.id is not None:
                    assert delta.index == len(calls) and delta.type == "function"
                    calls.append({"name": delta.function.name, "arguments": ""})
                else:
                    assert delta.function.name is None
                calls[delta.index]["arguments"] += delta.function.arguments
            finish = choice.finish_reason or finish
    return content, calls, finish


def test_calls(family: Family) -> None:
    family.will_say(
        "</think>Let me look.\n" + family.call if "<tool" in family.call else "Let me look.\n" + family.call
    )
    answer = family.client.chat.completions.create(model="echo", messages=USER, tools=[WEATHER, TIME])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
    assert "weather" in family.prompt() and "time" in family.prompt()
    assert answer.usage is not None and answer.usage.completion_tokens == len(family.engine.script or ())
    # The client sends it all back, with what the tool says.
    again = [*USER, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Yes."}]
    family.client.chat.completions.create(model="echo", messages=again, tools=[WEATHER], max_tokens=1)
    assert "K\u00f6ln" in family.prompt().replace("bytes:\\xc3bytes:\\xb6", "\u00f6") and "Yes." in family.prompt()


def test_calls_streamed(family: Family) -> None:
    family.will_say(family.call.join(["</think>" if "<tool" in family.call else "", ""]))
    stream = family.client.chat.completions.create(model="echo", messages=USER, tools=[WEATHER], stream=True)
    chunks = list(stream)
    content, calls, finish = joined(chunks)
    assert (content, finish) == ("", "tool_calls")
    assert [call["name"] for call in calls] == ["weather"] and json.loads(calls[0]["arguments"]) == ARGUMENTS
    assert sum(bool(c.choices[0].delta.tool_calls) for c in chunks) > 4, "arguments came in one piece"


def test_calls_streamed_async(family: Family) -> None:
    family.will_say(("</think>" if "<tool" in family.call else "") + family.call)

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{family.server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="echo", messages=USER, tools=[WEATHER], n=2, stream=True, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in stream]

    chunks = asyncio.run(ask())
    for index in (0, 1):
        own = [c for c in chunks if c.choices and c.choices[0].index == index]
        _, calls, finish = joined(own)
        assert finish == "tool_calls" and json.loads(calls[0]["arguments"]) == ARGUMENTS
    assert chunks[-1].usage.completion_tokens == 2 * len(family.engine.script or ())


def test_one_call_at_a_time(family: Family) -> None:
    family.will_say(("</think>" if "<tool" in family.call else "") + family.call * 2)
    asked: dict[str, Any] = {"model": "echo", "messages": USER, "tools": [WEATHER]}
    both = family.client.chat.completions.create(**asked)
    assert len(both.choices[0].message.tool_calls or []) == 2
    one = family.client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls or []) == 1
    assert len(joined(family.client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True))[1]) == 1


def test_no_calls_wanted(family: Family) -> None:
    family.will_say(("</think>" if "<tool" in family.call else "") + family.call)
    asked: dict[str, Any] = {"model": "echo", "messages": USER}
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = family.client.chat.completions.create(**asked, **more)
        assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == family.call
        assert "weather" not in family.prompt()


def test_calls_that_are_forced(family: Family) -> None:
    asked: dict[str, Any] = {"model": "echo", "messages": USER, "tools": [WEATHER, TIME]}
    named = {"type": "function", "function": {"name": "weather"}}
    family.will_say(json.dumps(ARGUMENTS))
    answer = family.client.chat.completions.create(**asked, tool_choice=named)
    assert answer.choices[0].finish_reason == "stop"  # as OpenAI's
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        ARGUMENTS,
    )
    grammar = family.engine.submitted[-1].sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.text) == WEATHER["function"]["parameters"]
    assert not family.prompt().rstrip().endswith("<think>")
    family.will_say(json.dumps([{"name": "time", "parameters": {}}, {"name": "weather", "parameters": ARGUMENTS}]))
    required = family.client.chat.completions.create(**asked, tool_choice="required")
    calls = [call.function for call in required.choices[0].message.tool_calls or [] if call.type == "function"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("time", {}), ("weather", ARGUMENTS)]
    assert required.choices[0].finish_reason == "tool_calls" and required.choices[0].message.content is None
    _, calls_, finish = joined(family.client.chat.completions.create(**asked, tool_choice="required", stream=True))
    assert [call["name"] for call in calls_] == ["time", "weather"] and finish == "tool_calls"


@pytest.mark.parametrize("family", ["glm"], indirect=True)
def test_reasoning(family: Family) -> None:
    family.will_say("It may\nrain.</think>\n\nNo." + family.call)
    asked: dict[str, Any] = {"model": "echo", "messages": USER}
    message = family.client.chat.completions.create(**asked, tools=[WEATHER]).choices[0].message
    extra = message.model_extra or {}
    assert extra["reasoning_content"] == extra["reasoning"] == "It may\nrain." and message.content == "No."
    assert message.tool_calls
    reasoning = ""
    for chunk in family.client.chat.completions.create(**asked, stream=True):
        part = (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        assert "<" not in part
        reasoning += part
    assert reasoning == "It may\nrain."
    again = [*USER, message.model_dump(), *USER]
    family.client.chat.completions.create(model="echo", messages=again, max_tokens=1)
    assert "<think>It may\nrain.</think>" in family.prompt()
    family.will_say("No.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = family.client.chat.completions.create(**asked, extra_body=off).choices[0].message
    assert message.content == "No." and "reasoning" not in (message.model_extra or {})
    assert family.prompt().endswith("</think>")


def test_a_form_leaves_no_room_for_thoughts(family: Family) -> None:
    family.will_say("{}")
    answer = family.client.chat.completions.create(model="echo", messages=USER, response_format={"type": "json_object"})
    assert answer.choices[0].message.content == "{}" and not family.prompt().endswith("<think>")


def test_parsers_may_be_chosen(family: Family) -> None:
    address = family.engine._address
    flags = ("--keep-engine", "--tool-parser", "none", "--reasoning-parser", "none")
    server = wait_until_ready(start_frontend(address, "--tokenizer", str(family.folder), *flags))
    try:
        refused = server.ask("POST", "/v1/chat/completions", {"messages": USER, "tools": [TIME]})
        assert refused.status == 400 and refused.json["error"]["param"] == "tools"
        assert "--tool-parser" in refused.json["error"]["message"]
        family.will_say("a</think>b" if "<tool" in family.call else "ab")
        answer = server.ask("POST", "/v1/chat/completions", {"messages": USER}).json["choices"][0]
        assert answer["message"]["content"] == ("a</think>b" if "<tool" in family.call else "ab")
    finally:
        server.end()


def test_templates_get_arguments_as_they_want_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "\u00f6"}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    as_text = ChatTemplate("{{ 'x' + messages[0].tool_calls[0].function.arguments }}", {})
    assert as_text.render(messages) == 'x{"a": "\u00f6"}'
    as_object = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.a }}", {})
    assert as_object.render(messages) == "\u00f6"
    assert ChatTemplate("{{ messages[0].content }}", {}).render(messages) == ""
    assert ChatTemplate("{{ messages[0]['content'] is none }}", {}).render(messages) == "True"
    without_calls = [{"role": "assistant", "content": None}]
    assert ChatTemplate("{{ messages[0]['content'] is none }}", {}).render(without_calls) == "False"
    with pytest.raises(ApiError, match="messages"):
        ChatTemplate("{{ 'x' + messages }}", {}).render(messages)


def test_templates_without_a_place_for_tools(server: FrontendProcess) -> None:
    refused = server.ask("POST", "/v1/chat/completions", {"messages": USER, "tools": [TIME]})
    assert refused.status == 400 and "no place for them" in refused.json["error"]["message"]
