"""Tool calls as GLM's models write them (4.5, 4.6, 4.7, 5):

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> ... </tool_call>

GLM-4.5 puts each part on a line of its own. Strings are written without quotes and everything else as JSON, so only the
tool's schema tells whether 5 is a number. Source: the models' chat templates.
"""

from __future__ import annotations

from typing import Any

from splash_trt.frontend.tools.arguments import Arguments, types_of
from splash_trt.frontend.tools.events import CallBegin, Event
from splash_trt.frontend.tools.tag_reader import TagReader

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
STRING = frozenset({"string"})


class GlmReader(TagReader):
    """schemas: {function name: {parameter name: its JSON Schema}}."""

    def __init__(self, schemas: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._name = ""
        self._types: frozenset[str] | None = None

    def _cut_off(self, rest: str, events: list[Event]) -> None:
        if self._state == "value" and self._types == STRING:
            self._more(self._arguments.string(rest), events)

    def _in_content(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([CALL])
        self._say(self._content.push(text), events)
        if tag is not None:
            self._content.end()
            self._head = ""
            self._state = "name"
        return tag is not None

    def _in_name(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([KEY, CALL_END])
        self._head += text
        if tag is None:
            return False
        self._name = self._head.strip()
        self._num_calls += 1
        self._arguments = Arguments()
        events.append(CallBegin(self._name))
        self._after_part(tag, events)
        return True

    def _in_call(self, events: list[Event]) -> bool:
        _, tag = self._cutter.until([KEY, CALL_END])
        if tag is not None:
            self._after_part(tag, events)
        return tag is not None

    def _after_part(self, tag: str, events: list[Event]) -> None:
        """Goes on to another key, or to the end of the call."""
        self._head = ""
        self._state = "key" if tag == KEY else "content"
        if tag == CALL_END:
            self._more(self._arguments.end(), events)

    def _in_key(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([KEY_END])
        self._head += text
        if tag is not None:
            key = self._head.strip()
            self._types = types_of(self._schemas.get(self._name, {}).get(key))
            self._more(self._arguments.key(key), events)
            self._state = "before_value"
        return tag is not None

    def _in_before_value(self, events: list[Event]) -> bool:
        _, tag = self._cutter.until([VALUE])
        if tag is not None:
            self._head = ""
            self._state = "value"
        return tag is not None

    def _in_value(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([VALUE_END])
        if self._types == STRING:
            self._more(self._arguments.string(text), events)
        else:
            self._head += text
        if tag is not None:
            is_string = self._types == STRING
            ended = self._arguments.end_string() if is_string else self._arguments.value(self._head, self._types)
            self._more(ended, events)
            self._state = "call"
        return tag is not None
