"""A checkpoint's chat template, which turns messages and tools into text of the form that the model was trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splash_trt.frontend.errors import ApiError

_ASKS_FOR_NONE = re.compile(r"content['\"]?\]? is (not )?none")


class TemplateRefusal(TemplateError):
    """The template called raise_exception."""


class ChatTemplate:
    """A checkpoint's chat template. It is run in a sandbox, as it comes from a file that is not trusted."""

    def __init__(self, source: str, names: dict[str, str]) -> None:
        """names: {"bos_token": …} and the like. Raises ValueError if the source is no template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._names = names
        self.source = source
        try:
            self._template: Template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ValueError(f"chat_template: {error}") from None

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template in chat_template.jinja, or else in tokenizer_config.json; None if there is none."""
        config = _read_json(folder / "tokenizer_config.json")
        names = {}
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                names[name] = text
        file, source = folder / "chat_template.jinja", config.get("chat_template")
        if file.exists():
            source = file.read_text(encoding="utf-8")
        if isinstance(source, list):  # several, by name
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        return cls(source, names) if isinstance(source, str) else None

    @property
    def takes_tools(self) -> bool:
        return "tools" in self._variables

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        more: dict[str, Any] | None = None,
        *,
        answer_follows: bool = True,
    ) -> str:
        """The chat's text up to where the answer begins. Raises ApiError if the template refuses the chat.

        Arguments of calls in `messages` are objects. more: the template's own switches, such as enable_thinking.
        answer_follows: whether the text ends with the template's header of an answer.
        """
        given = {**(more or {}), "tools": tools, "add_generation_prompt": answer_follows, **self._names}
        # Templates that test for it get None as content of a message with calls; most others would write "None".
        keeps_none = bool(_ASKS_FOR_NONE.search(self.source))
        messages = [
            {**m, "content": ""} if m.get("content") is None and not (keeps_none and m.get("tool_calls")) else m
            for m in messages
        ]
        try:
            return self._render(messages, given)
        except TemplateRefusal as refusal:
            raise ApiError(f"messages: {refusal}", param="messages") from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # The template expects something that the messages lack.
            message = f"messages: the model's chat template cannot take them: {error}"
            raise ApiError(message, param="messages") from None

    def _render(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
        try:
            return self._template.render(messages=messages, **given)
        except TypeError:
            with_text = [_with_text_arguments(message) for message in messages]
            if with_text == messages:
                raise
            # Some templates, such as DeepSeek-V3's, append the arguments to other text, so they need JSON text.
            return self._template.render(messages=with_text, **given)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": _to_json(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes HTML, which models were not trained on. The parameters are those of transformers' one.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tokenizer: {path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
