"""Arguments that a model writes key by key, as the JSON text that clients expect."""

from __future__ import annotations

import json
from typing import Any

ANY = None
"""In place of a set of types: they are not known, so any is allowed."""

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def types_of(schema: Any, depth: int = 8) -> frozenset[str] | None:
    """Names of the JSON types that a parameter's JSON Schema allows; ANY if it does not say."""
    if not isinstance(schema, dict) or depth == 0:
        return ANY
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return _union([_type_of(value) for value in schema["enum"]])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _union([types_of(part, depth - 1) for part in schema[key]])
    return ANY


def _union(parts: list[frozenset[str] | None]) -> frozenset[str] | None:
    union: frozenset[str] = frozenset()
    for part in parts:
        if part is None:
            return ANY
        union |= part
    return union


def _type_of(value: Any) -> frozenset[str] | None:
    fitting = {name for name, kinds in _JSON_TYPES.items() if type(value) in kinds}
    return frozenset(fitting) or ANY


class Arguments:
    """Writes one JSON object. What its methods return, joined, is the object's text."""

    def __init__(self) -> None:
        self._num_keys = 0
        self._in_string = False

    def key(self, name: str) -> str:
        opening = "{" if self._num_keys == 0 else ", "
        self._num_keys += 1
        return f"{opening}{_dump(name)}: "

    def string(self, text: str) -> str:
        """More of a string value."""
        opening = "" if self._in_string else '"'
        self._in_string = True
        return opening + _dump(text)[1:-1]

    def end_string(self) -> str:
        opening = "" if self._in_string else '"'
        self._in_string = False
        return opening + '"'

    def value(self, text: str, types: frozenset[str] | None) -> str:
        """A value that the model wrote: as JSON, or, if that is not valid or its type is not allowed, as a bare string.

        types: the allowed ones. If a string is not allowed, valid JSON of any type stays as it is.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _dump(text)
        found = _type_of(value)
        fits = types is None or found is None or bool(found & types) or "string" not in types
        return _dump(value) if fits else _dump(text)

    def end(self) -> str:
        return "}" if self._num_keys else "{}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
