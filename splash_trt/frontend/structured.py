"""Makes one Grammar of the various fields by which clients say what form an answer must have."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from splash_trt.frontend.chat import ChatBody
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.protocol import GenerationBody, ResponseFormat
from splash_trt.frontend.tools.forced import NO_PARAMETERS, calls_schema
from splash_trt.request import Grammar, GrammarKind

Found = tuple[str, GrammarKind, str]
"""(the field that asks for a form, the grammar's kind, its text)."""


class Form(NamedTuple):
    """The form that an answer must have, and the field that says so."""

    grammar: Grammar
    field: str


def form_of(body: GenerationBody) -> Form | None:
    """The form that the body asks for; None: any text. Raises ApiError if two fields ask for one, or it is invalid."""
    found = [*_from_response_format(body.response_format), *_from_structured_outputs(body), *_from_guided(body)]
    if isinstance(body, ChatBody) and body.functions:
        if found:
            message = f'{found[0][0]}: does not go with tools, unless tool_choice is "none"'
            raise ApiError(message, param=found[0][0])
        found = _from_tools(body)
    if not found:
        return None
    if len(found) > 1:
        message = f"{found[1][0]}: does not go with {found[0][0]}; one form at a time"
        raise ApiError(message, param=found[1][0])
    field, kind, text = found[0]
    try:
        return Form(Grammar(kind, text), field)
    except ValueError as error:
        what = str(error).partition(": ")[2]
        raise ApiError(f"{field}: {what}", param=field) from None


def _from_response_format(wanted: ResponseFormat | None) -> list[Found]:
    if wanted is None or wanted.type == "text":
        return []
    field = "response_format"
    if wanted.type == "json_object":
        return [(field, GrammarKind.JSON_OBJECT, "")]
    given = getattr(wanted, wanted.type)
    if wanted.type == "json_schema" and given is not None:
        given = given.schema
        field += ".json_schema"
    if given is None:
        missing = f"{field}.schema" if field.endswith("json_schema") else f"{field}.{wanted.type}"
        raise ApiError(f"{missing}: is missing, and the type asks for it", param=missing)
    if wanted.type == "json_schema":
        return [_schema(f"{field}.schema", given)]
    kind = GrammarKind.REGEX if wanted.type == "regex" else GrammarKind.LARK
    return [_text(f"{field}.{wanted.type}", kind, given)]


def _from_structured_outputs(body: GenerationBody) -> list[Found]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    parts = _parts("structured_outputs.", wanted.json, wanted.regex, wanted.choice, wanted.grammar)
    if wanted.json_object:
        parts.append(("structured_outputs.json_object", GrammarKind.JSON_OBJECT, ""))
    return parts


def _from_guided(body: GenerationBody) -> list[Found]:
    return _parts("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _parts(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Found]:
    parts: list[Found] = []
    if schema is not None:
        parts.append(_schema(f"{prefix}json", schema))
    if regex is not None:
        parts.append(_text(f"{prefix}regex", GrammarKind.REGEX, regex))
    if choice is not None:
        parts.append(_text(f"{prefix}choice", GrammarKind.REGEX, "|".join(f"({_literal(text)})" for text in choice)))
    if grammar is not None:
        parts.append(_text(f"{prefix}grammar", GrammarKind.LARK, grammar))
    return parts


def _from_tools(body: ChatBody) -> list[Found]:
    if not body.forces_calls:
        return []
    if body.forced_function is not None:
        return [_schema("tools", body.functions[body.forced_function] or NO_PARAMETERS)]
    return [_schema("tools", calls_schema(body.functions, 1 if body.parallel_tool_calls is False else None))]


def _schema(field: str, schema: dict[str, Any] | str) -> Found:
    if isinstance(schema, dict):
        return field, GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False)
    try:
        is_schema = isinstance(json.loads(schema), dict | bool)
    except (ValueError, RecursionError):
        is_schema = False
    if not is_schema:
        raise ApiError(f"{field}: this is not the JSON text of a schema", param=field)
    return field, GrammarKind.JSON_SCHEMA, schema


def _text(field: str, kind: GrammarKind, text: str) -> Found:
    if not text:
        raise ApiError(f"{field}: is empty", param=field)
    return field, kind, text


def _literal(text: str) -> str:
    """A regular expression, in Rust's syntax, for exactly this text. (There, backslash and < is no <.)"""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)
