"""Tool calls that a grammar forces: the answer is JSON from its first token, whatever the model's own format is."""

from __future__ import annotations

import json
from typing import Any

from splash_trt.frontend.tools.events import CallArguments, CallBegin, Event

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class NamedCallReader:
    """The whole answer is the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._events: list[Event] = [CallBegin(name)]

    def push(self, text: str) -> list[Event]:
        events, self._events = self._events, []
        return [*events, CallArguments(text)] if text else events

    def flush(self) -> list[Event]:
        return self.push("")


def calls_schema(functions: dict[str, dict[str, Any] | None], at_most: int | None) -> dict[str, Any]:
    """JSON Schema of a list of one or more calls. functions: {name: JSON Schema of its parameters}."""
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters or NO_PARAMETERS},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in functions.items()
    ]
    most = {} if at_most is None else {"maxItems": at_most}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": kinds} if len(kinds) > 1 else kinds[0]}


def _spoken(string: str) -> str:
    """The value of a JSON string. Does not fail if it is not valid, though the grammar allows only JSON."""
    try:
        return str(json.loads(string))
    except ValueError:
        return string[1:-1]


class CallListReader:
    """Reads [{"name": NAME, "parameters": {...}}, ...] a character at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._string: str | None = None  # the string under way, with its opening quote
        self._escaped = False
        self._key = ""  # the present key of the call's object, once its colon has come
        self._last_string = ""
        self._named = False  # the name of the call's object has come
        self._arguments = ""  # the part of the arguments that came in this push

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            self._read(character, events)
        self._end_piece(events)
        return events

    def flush(self) -> list[Event]:
        return []

    @property
    def _in_arguments(self) -> bool:
        return self._depth > 2 and self._named

    def _read(self, character: str, events: list[Event]) -> None:
        if self._string is not None:
            self._read_in_string(character, events)
        elif character == '"':
            self._string = character
        elif character in "{[":
            self._depth += 1
            self._named = self._named and self._depth > 2
        elif character in "}]":
            if self._in_arguments:
                self._arguments += character
            self._depth -= 1
            return
        elif character == ":" and self._depth == 2:
            self._key = self._last_string
        if self._in_arguments:
            self._arguments += character

    def _read_in_string(self, character: str, events: list[Event]) -> None:
        assert self._string is not None
        self._string += character
        if self._escaped or character == "\\":
            self._escaped = not self._escaped
        elif character == '"':
            string, self._string = self._string, None
            if self._depth == 2:
                self._last_string = _spoken(string)
                if self._key == "name":
                    self._key, self._named = "", True
                    self._end_piece(events)
                    events.append(CallBegin(self._last_string))

    def _end_piece(self, events: list[Event]) -> None:
        if self._arguments:
            events.append(CallArguments(self._arguments))
            self._arguments = ""
