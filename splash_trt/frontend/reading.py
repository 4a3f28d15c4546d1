"""Turns an answer's text into reasoning, content and tool calls, by the formats that the model is known to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from splash_trt.frontend import reasoning
from splash_trt.frontend.reasoning import ReasoningReader
from splash_trt.frontend.tools import deepseek, glm
from splash_trt.frontend.tools.deepseek import DeepSeekReader
from splash_trt.frontend.tools.events import Content, Event, Reader
from splash_trt.frontend.tools.glm import GlmReader

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (AUTO, "deepseek_v3", "glm", NONE)
REASONING_PARSERS = (AUTO, "think", NONE)

Knows = Callable[[str], bool]
"""Whether a text is one of the vocabulary's tokens, or part of the chat template."""


def choose_tool_parser(asked: str, knows: Knows) -> str:
    """One of TOOL_PARSERS other than "auto"."""
    if asked != AUTO:
        return asked
    if knows(deepseek.CALLS_BEGIN) or knows(deepseek.DSML):
        return "deepseek_v3"
    return "glm" if knows(glm.CALL) and knows(glm.KEY) else NONE


def choose_reasoning_parser(asked: str, knows: Knows) -> str:
    """One of REASONING_PARSERS other than "auto"."""
    if asked != AUTO:
        return asked
    return "think" if all(map(knows, reasoning.MARKERS)) else NONE


def markers(tool_parser: str, reasoning_parser: str) -> tuple[str, ...]:
    """The tags that readers look for, which have to be in the text even if they are special tokens."""
    of_tools = {"deepseek_v3": deepseek.MARKERS, "glm": glm.MARKERS}.get(tool_parser, ())
    return (*of_tools, *(reasoning.MARKERS if reasoning_parser == "think" else ()))


def call_reader(tool_parser: str, functions: dict[str, dict[str, Any] | None]) -> Reader:
    """A reader of tool calls. functions: {name: JSON Schema of its parameters}."""
    if tool_parser == "deepseek_v3":
        return DeepSeekReader()
    assert tool_parser == "glm", tool_parser
    schemas = {name: (schema or {}).get("properties") for name, schema in functions.items()}
    return GlmReader({name: known if isinstance(known, dict) else {} for name, known in schemas.items()})


class MessageReader:
    """Splits off the reasoning first, and then looks for calls in the rest. None: do not."""

    def __init__(self, thoughts: ReasoningReader | None, calls: Reader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def push(self, text: str) -> list[Event]:
        return self._read_calls([Content(text)] if self._thoughts is None else self._thoughts.push(text))

    def flush(self) -> list[Event]:
        events = [] if self._thoughts is None else self._read_calls(self._thoughts.flush())
        return [*events, *(() if self._calls is None else self._calls.flush())]

    def _read_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        read: list[Event] = []
        for event in events:
            read += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return read
