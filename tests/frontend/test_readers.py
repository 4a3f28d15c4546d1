"""Text is split into reasoning, content and tool calls: the same however the text is cut, and never with part of a tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.frontend.reading import MessageReader, call_reader
from splash_trt.frontend.reasoning import MARKERS, ReasoningReader, closed
from splash_trt.frontend.tools import deepseek, glm
from splash_trt.frontend.tools.arguments import types_of
from splash_trt.frontend.tools.deepseek import DeepSeekReader
from splash_trt.frontend.tools.events import CallArguments, CallBegin, Content, Cutter, Event, Reader, Reasoning
from splash_trt.frontend.tools.forced import CallListReader, NamedCallReader, calls_schema
from splash_trt.frontend.tools.glm import GlmReader

RUNS = settings(deadline=None, derandomize=True, max_examples=150)
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
    }
}
B, E = deepseek.CALLS_BEGIN, deepseek.CALLS_END
CB, CE, SEP = deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.SEPARATOR
D = deepseek.DSML

Joined = list[Any]


def joined(events: Iterable[Event]) -> Joined:
    """Neighbours of one kind as one: ["content", text], ["reasoning", text], ["call", name, arguments]."""
    result: Joined = []
    for event in events:
        if isinstance(event, CallBegin):
            result.append(["call", event.name, ""])
        elif isinstance(event, CallArguments):
            assert result[-1][0] == "call"
            result[-1][2] += event.text
        else:
            kind = "content" if isinstance(event, Content) else "reasoning"
            if not result or result[-1][0] != kind:
                result.append([kind, ""])
            result[-1][1] += event.text
    return result


def read(reader: Reader, pieces: Iterable[str]) -> list[Event]:
    return [*(event for piece in pieces for event in reader.push(piece)), *reader.flush()]


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def glm_reader() -> Reader:
    return GlmReader(SCHEMAS)


def both() -> Reader:
    return MessageReader(ReasoningReader(inside=False), GlmReader(SCHEMAS))


V31 = f'Let me look. \n{B}{CB}weather{SEP}{{"city": "K\u00f6ln"}}{CE}{CB}time{SEP}{{}}{CE}{E}'
V3 = (
    f'{B}{CB}function{SEP}weather\n```json\n{{"city": "a```b"}}\n```{CE}\n'
    f"{CB}function{SEP}time\n```json\n{{}}\n```{CE}{E}"
)
V32 = (
    f'Well.\n\n<{D}function_calls>\n<{D}invoke name="weather">\n<{D}parameter name="city" string="true">'
    f'K\u00f6ln "<b>"</{D}parameter>\n<{D}parameter name="days" string="false">3</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="time">\n</{D}invoke>\n<{D}invoke name="raw">{{"a": 1}}</{D}invoke>\n</{D}function_calls>'
)
GLM45 = (
    'One moment.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K\u00f6ln "5"\n</arg_value>\n<arg_key>days'
    "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>\n"
)
GLM47 = (
    "<tool_call>weather<arg_key>zip</arg_key><arg_value>50667</arg_value><arg_key>unit</arg_key><arg_value>C"
    "</arg_value><arg_key>more</arg_key><arg_value>[1, null]</arg_value></tool_call><tool_call>time</tool_call>"
)
WEATHER = ["call", "weather", '{"zip": "50667", "unit": "C", "more": [1, null]}']
TIME = ["call", "time", "{}"]
CASES: list[tuple[Callable[[], Reader], str, Joined]] = [
    (DeepSeekReader, V31, [["content", "Let me look."], ["call", "weather", '{"city": "K\u00f6ln"}'], TIME]),
    (DeepSeekReader, V3, [["call", "weather", '{"city": "a```b"}'], ["call", "time", "{}"]]),
    (DeepSeekReader, f"{B}{CB}function{SEP}{{}}{CE}{E}", [["call", "function", "{}"]]),
    (
        DeepSeekReader,
        V32,
        [
            ["content", "Well."],
            ["call", "weather", '{"city": "K\u00f6ln \\"<b>\\"", "days": 3}'],
            ["call", "time", "{}"],
            ["call", "raw", '{"a": 1}'],
        ],
    ),
    (DeepSeekReader, "a < b <\uff5ctool and\n", [["content", "a < b <\uff5ctool and\n"]]),
    (DeepSeekReader, f"{B}{CB}weather{SEP}" + '{"city": "K', [["call", "weather", '{"city": "K']]),
    (
        glm_reader,
        GLM45,
        [["content", "One moment."], ["call", "weather", '{"city": "K\u00f6ln \\"5\\"\\n", "days": 3}'], TIME],
    ),
    (glm_reader, GLM47, [WEATHER, TIME]),
    (glm_reader, "no <tool_ call", [["content", "no <tool_ call"]]),
    (glm_reader, "x <tool_call>wea", [["content", "x"]]),
    (
        glm_reader,
        "<tool_call>t<arg_key>k</arg_key><arg_value>not JSON</arg_value></tool_call>",
        [["call", "t", '{"k": "not JSON"}']],
    ),
    (lambda: ReasoningReader(True), "\nhm, <b>\n</think>\n\nYes.\n", [["reasoning", "hm, <b>"], ["content", "Yes.\n"]]),
    (lambda: ReasoningReader(True), "hm", [["reasoning", "hm"]]),
    (lambda: ReasoningReader(False), "\n<think>hm</think>Yes", [["reasoning", "hm"], ["content", "Yes"]]),
    (lambda: ReasoningReader(False), "<think></think>\nYes", [["content", "Yes"]]),
    (lambda: ReasoningReader(False), " Yes <think> no </think>", [["content", " Yes <think> no </think>"]]),
    (lambda: ReasoningReader(False), "\n <thi", [["content", "\n <thi"]]),
    (both, f"<think>\nhm</think>\n{GLM47}", [["reasoning", "hm"], WEATHER, TIME]),
    (both, "<think>no <tool_call> here</think>", [["reasoning", "no <tool_call> here"]]),
    (lambda: NamedCallReader("f"), '{"a": 1}', [["call", "f", '{"a": 1}']]),
    (
        CallListReader,
        '[{"name": "f", "parameters": {"name": "g", "x": ["}", {"y": "\\""}]}},\n {"name":"g","parameters":{}}]',
        [["call", "f", '{"name": "g", "x": ["}", {"y": "\\""}]}'], ["call", "g", "{}"]],
    ),
]  # fmt: skip
TAGS = (*deepseek.MARKERS, *glm.MARKERS, *MARKERS, f"<{D}invoke", f"</{D}invoke>", f"<{D}parameter")


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_known_texts_in_one_piece_and_by_characters(make: Callable[[], Reader], text: str, expected: Joined) -> None:
    assert joined(read(make(), [text])) == expected
    assert joined(read(make(), text)) == expected


@RUNS
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=12))
def test_known_texts_however_cut(case: tuple[Callable[[], Reader], str, Joined], places: list[int]) -> None:
    make, text, expected = case
    assert joined(read(make(), cut(text, places))) == expected


ANY_TEXT = st.lists(
    st.one_of(
        st.sampled_from([*TAGS, "```json", "\n", "{", "}", '"', ">", 'name="x"']), st.text("ab <{\u20ac", max_size=3)
    ),
    max_size=14,
).map("".join)
ANY_READER = st.sampled_from([DeepSeekReader, glm_reader, both, lambda: ReasoningReader(True), CallListReader])


@RUNS
@given(ANY_READER, ANY_TEXT, st.lists(st.integers(0, 10_000), max_size=12))
def test_any_text_however_cut(make: Callable[[], Reader], text: str, places: list[int]) -> None:
    """Nonsense too: the answer does not depend on the cuts, and nothing is raised."""
    expected = joined(read(make(), [text]))
    assert joined(read(make(), cut(text, places))) == expected


@RUNS
@given(st.text("ab<\n", max_size=30), st.lists(st.integers(0, 100), max_size=6))
def test_text_without_tags_stays_as_it_is(text: str, places: list[int]) -> None:
    for make in (DeepSeekReader, glm_reader, both):
        assert joined(read(make(), cut(text, places))) == ([["content", text]] if text else [])


@pytest.mark.parametrize(
    ("make", "text"), [(DeepSeekReader, V31), (DeepSeekReader, V32), (glm_reader, GLM45), (both, GLM47)]
)
def test_no_event_has_a_part_of_a_tag_and_text_comes_as_early_as_it_can(make: Callable[[], Reader], text: str) -> None:
    reader = make()
    seen = 0
    for character in text:
        for event in reader.push(character):
            seen += 1
            if isinstance(event, Content | Reasoning):
                assert not any(part in event.text for part in ("<", ">", "tool", "DSML"))
    assert seen > 10, "it came in a few large pieces"


def test_string_arguments_come_bit_by_bit() -> None:
    reader = GlmReader(SCHEMAS)
    begin = reader.push("<tool_call>weather<arg_key>city</arg_key><arg_value>")
    assert joined_text(begin) == '{"city": "'
    assert [joined_text(reader.push(piece)) for piece in ("Ka", "ir", "o</arg_val", "ue>")] == ["Ka", "ir", "o", '"']


def joined_text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, CallArguments))


def test_what_a_schema_allows() -> None:
    assert types_of({"type": ["string", "null"]}) == {"string", "null"}
    assert types_of({"anyOf": [{"type": "integer"}, {"enum": ["a", 1.5]}]}) == {"integer", "string", "number"}
    assert types_of({"$ref": "#/x"}) is None and types_of(True) is None


def test_prompts_whose_thoughts_are_closed_for_answers_of_a_form() -> None:
    assert closed("<a><think>\n") == "<a><think>\n</think>" and closed("<a></think>") == "<a></think>"


def test_schema_of_forced_calls() -> None:
    one = calls_schema({"f": None}, 1)
    assert one["maxItems"] == 1 and one["items"]["properties"]["name"] == {"const": "f"}
    two = calls_schema({"f": None, "g": {"type": "object"}}, None)
    assert [kind["properties"]["name"]["const"] for kind in two["items"]["anyOf"]] == ["f", "g"]


def test_readers_by_name() -> None:
    assert isinstance(call_reader("deepseek_v3", {}), DeepSeekReader)
    assert isinstance(call_reader("glm", {"f": {"properties": 5}, "g": None}), GlmReader)


def test_cutter_holds_no_more_than_it_must() -> None:
    cutter = Cutter()
    cutter.push("a <ta")
    assert cutter.until(["<tag>"]) == ("a ", None)
    cutter.push("b")
    assert cutter.until(["<tag>"]) == ("<tab", None)
    cutter.push("<tag>c")
    assert cutter.until(["<tag>"]) == ("", "<tag>") and cutter.rest() == "c"
