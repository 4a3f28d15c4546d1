"""Chats as clients send them: messages and tools, and the form in which the model's chat template gets them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from splash_trt.frontend.chat_template import ChatTemplate
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.protocol import MAX_TOOLS, Alternatives, Count, FunctionName, GenerationBody, Part

RESERVED = ("messages", "tools", "add_generation_prompt")
"""Names that chat_template_kwargs may not contain, as the template gets them from the request itself."""

NEED_CONTENT = ("system", "developer", "user")
"""Roles whose messages must have content."""


class ContentPart(Part, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Text. Parts of other types have fields of their own, and are refused by their type (Message.for_template)."""

    type: str
    text: str | None = None


class CalledFunction(Part, frozen=True, kw_only=True):
    name: str
    arguments: str = "{}"
    """JSON text of an object."""


class ToolCall(Part, frozen=True, kw_only=True):
    """One that the model has made."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Part, frozen=True, kw_only=True):
    """One message of a chat. The fields that must be null are those with which clients send an answer back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """As `reasoning_content`."""
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def for_template(self, number: int) -> dict[str, Any]:
        """The message as chat templates take it: content None if there is none, arguments of calls as objects.

        number: the message's, for errors.
        """
        field = f"messages[{number}]"
        if self.content is None and self.role in NEED_CONTENT:
            message = f"{field}.content: null is not allowed with the role {self.role}; it must be a text"
            raise ApiError(message, param=f"{field}.content")
        if not isinstance(self.content, str):
            for part in self.content or ():
                if part.type != "text" or part.text is None:
                    what = "without text" if part.type == "text" else f"of type {part.type[:40]!r}"
                    message = f"{field}.content: a part {what} is not allowed; only text parts are supported"
                    raise ApiError(message, param=f"{field}.content")
        text = "".join(part.text or "" for part in self.content) if isinstance(self.content, list) else self.content
        calls = [_call_for_template(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())]
        more = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {"role": self.role, "content": text, **{k: v for k, v in more.items() if v is not None}}


def _call_for_template(call: ToolCall, field: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        field = f"{field}.function.arguments"
        raise ApiError(f"{field}: this is not the JSON text of an object: {error}", param=field) from None
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class FunctionSpec(Part, frozen=True, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema; None: no parameters."""
    strict: bool | None = None


class Tool(Part, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Part, frozen=True, kw_only=True):
    name: str


class NamedChoice(Part, frozen=True, kw_only=True):
    type: Literal["function"]
    function: ChosenFunction


Messages = Annotated[list[Message], Meta(min_length=1)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. Without max_tokens an answer may use the rest of the context."""

    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """The template's own switches, such as {"enable_thinking": false}."""
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Given to the template under this name."""
    store: Literal[False] | None = None

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs

    @property
    def switches(self) -> dict[str, Any]:
        """What the template gets in addition to messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def functions(self) -> dict[str, dict[str, Any] | None]:
        """{name: JSON Schema of its parameters} of the tools that may be called. Empty with tool_choice "none"."""
        if self.tool_choice == "none":
            return {}
        return {tool.function.name: tool.function.parameters for tool in self.tools or ()}

    @property
    def forced_function(self) -> str | None:
        """The function that the answer has to call, if tool_choice names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def forces_calls(self) -> bool:
        """Whether the answer has to be one or more calls."""
        return isinstance(self.tool_choice, NamedChoice) or self.tool_choice == "required"

    def check(self) -> None:
        super().check()
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ApiError(f"tools: two of them are called {twice!r}", param="tools")
        if self.forces_calls and not names:
            raise ApiError("tool_choice: asks for a call, and there are no tools", param="tool_choice")
        if self.forced_function is not None and self.forced_function not in names:
            message = f"tool_choice: {self.forced_function!r} is not one of the tools: {', '.join(names)}"
            raise ApiError(message, param="tool_choice")
        if self.functions and not self.wants_text:
            raise ApiError("tools: calls are read from text, so detokenize must not be false", param="tools")


def render(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[Tool] | None,
    switches: dict[str, Any],
    *,
    answer_follows: bool = True,
) -> str:
    """The text of a chat, up to where the answer begins. ApiError says what the template cannot take."""
    taken = next((name for name in RESERVED if name in switches), None)
    if taken is not None:
        message = f"chat_template_kwargs: {taken!r} is not allowed here; it follows from the request"
        raise ApiError(message, param="chat_template_kwargs")
    if tools and not template.takes_tools:
        raise ApiError("tools: this model's chat template has no place for them", param="tools", code="no_tools")
    as_sent = msgspec.to_builtins(tools) if tools else None
    plain = [message.for_template(number) for number, message in enumerate(messages)]
    return template.render(plain, as_sent, switches, answer_follows=answer_follows)
