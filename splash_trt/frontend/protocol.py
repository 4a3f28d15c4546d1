"""What clients send, as OpenAI's API and its usual extensions name it: types, checks, and the way to a Request.

Whatever is wrong becomes an ApiError naming the field, so that the engine never sees it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from splash_trt.frontend.errors import ApiError
from splash_trt.link import Ready
from splash_trt.request import MAX_LOGPROBS, Request, SamplingParams

DEFAULT_MAX_TOKENS = 16
"""Of a completion; a chat may use the rest of the context."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
"""Fields of OpenAI's API that are not served: the values that ask for nothing, which clients send unasked."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """Send one more chunk at the end, with the token counts."""


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats share. null is as good as leaving a field out."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    detokenize: bool | None = None
    user: str | None = None
    """Taken and not used."""
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def wants_text(self) -> bool:
        return self.detokenize is not False

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        """Checked stop strings."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise ApiError(f"stop: {len(stop)} strings are too many; at most {MAX_STOPS} are allowed", param="stop")
        if any(not 1 <= len(s) <= MAX_STOP_CHARS for s in stop):
            raise ApiError(f"stop: each string must have from 1 to {MAX_STOP_CHARS} characters", param="stop")
        if stop and not self.wants_text:
            raise ApiError("stop: stop strings need text, so detokenize must not be false", param="stop")
        return tuple(stop)

    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each chosen token; None: no log-probabilities at all."""
        raise NotImplementedError


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each a non-empty string or a non-empty list of token ids."""
        kinds = {type(item) for item in self.prompt} if isinstance(self.prompt, list) else {str}
        if len(kinds) != 1:
            why = "an empty list" if not kinds else "a mixture of kinds"
            wanted = "a string, a list of strings, a list of token ids, or a list of such lists"
            raise ApiError(f"prompt: {why} is not allowed; it must be {wanted}", param="prompt")
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) and int not in kinds else [self.prompt]
        if any(len(prompt) == 0 for prompt in prompts):
            raise ApiError("prompt: an empty prompt is not allowed; it must have at least one token", param="prompt")
        return prompts


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat. The fields that must be null are those with which clients send an answer back."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def for_template(self, number: int) -> dict[str, str]:
        """As chat templates take it. `number` is for the error's words."""
        field = f"messages[{number}]"
        if not isinstance(self.content, str):
            for part in self.content or ():
                if part.type != "text":
                    message = f"{field}.content: parts of type {part.type!r} are not served, only text"
                    raise ApiError(message, param=f"{field}.content")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            allowed = f"it must be from 0 to {MAX_LOGPROBS}"
            raise ApiError(f"top_logprobs: {self.top_logprobs} is not allowed; {allowed}", param="top_logprobs")
        return self.top_logprobs

    def template_messages(self) -> list[dict[str, str]]:
        if not self.messages:
            raise ApiError("messages: an empty list is not allowed; it must have at least one", param="messages")
        return [message.for_template(number) for number, message in enumerate(self.messages)]


class LayoutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/layout."""

    layout: str
    pin: bool = False

    def check(self, layouts: tuple[str, ...]) -> None:
        allowed = ", ".join((*layouts, "auto"))
        if self.layout not in (*layouts, "auto"):
            raise ApiError(f"layout: {self.layout!r} is not allowed; it must be one of {allowed}", param="layout")
        if self.layout == "auto" and self.pin:
            raise ApiError("pin: 'auto' lets the layout follow the load, so it cannot be pinned", param="pin")


Body = TypeVar("Body", bound=msgspec.Struct)
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_AT_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"(?:unknown|missing required) field `(.*?)`")


def decode(data: bytes, body: type[Body]) -> Body:
    """The JSON text as a `body`, or an ApiError naming the field at fault."""
    try:
        return msgspec.json.decode(data, type=body)
    except msgspec.ValidationError as error:
        message = str(error)
        path, unknown = _AT_PATH.search(message), _UNKNOWN.search(message)
        parts = [path[1]] if path else []
        parts += [unknown[1]] if unknown else []
        param = ".".join(parts) or None
        what = message[: path.start()] if path else message
        raise ApiError(f"{param or 'body'}: {what}", param=param) from None
    except msgspec.DecodeError as error:
        param = _last_key_before(data, _fault_position(data, str(error)))
        where = f"{param}: " if param else "body: "
        raise ApiError(f"{where}this is not JSON in UTF-8: {error}", param=param, code="invalid_json") from None
    except RecursionError:
        raise ApiError("body: the JSON is nested too deeply", code="invalid_json") from None


def _fault_position(data: bytes, message: str) -> int:
    """Byte at which decoding failed, as far as it is known."""
    at = _AT_BYTE.search(message)
    if at:
        return int(at[1])
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def _last_key_before(data: bytes, position: int) -> str | None:
    """The field whose value holds `position`. Looks a little back only: a long prompt is not searched."""
    keys = _KEY.findall(data[max(0, position - 4096) : position])
    return keys[-1].decode(errors="replace")[:64] if keys else None


def check_neutral(body: GenerationBody) -> None:
    """Refuse what is known and not served."""
    for field, allowed in NEUTRAL.items():
        value = getattr(body, field, None)
        if value not in allowed:
            what = "only 1 is served" if field in ("n", "best_of") else "it is not served; leave it out"
            raise ApiError(f"{field}: {str(value)[:80]} is not allowed; {what}", param=field, code="unsupported_value")


def max_tokens(body: GenerationBody, default: int | None, room: int) -> int:
    """Output tokens at most. `room`: what the context leaves, which is also the default None. ApiError beyond it."""
    for field in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, field)
        if value is not None:
            if value < 1:
                raise ApiError(f"{field}: {value} is not allowed; it must be at least 1", param=field)
            if value > room:
                message = f"{field}: {value} is not allowed; the context leaves room for {room} after this prompt"
                raise ApiError(message, param=field)
            return value
    return room if default is None else min(default, room)


def to_request(
    body: GenerationBody, request_id: str, prompt: tuple[int, ...], ready: Ready, default_max_tokens: int | None
) -> Request:
    """What the engine is asked. ApiError if a value is out of its range or the model cannot take the prompt."""
    ids = body.stop_token_ids or []
    bad = next((i for i in ids if not 0 <= i < ready.vocab_size), None)
    if bad is not None:
        allowed = f"ids must be from 0 to {ready.vocab_size - 1}"
        raise ApiError(f"stop_token_ids: {bad} is not allowed; {allowed}", param="stop_token_ids")
    # A number above the vocabulary's size means the same as "off", and larger ones fit no message to the engine.
    top_k = body.top_k if body.top_k is None or body.top_k < ready.vocab_size else 0
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": top_k,
        "min_p": body.min_p,
    }
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens(body, default_max_tokens, max(1, ready.max_context - len(prompt))),
            seed=body.seed,
            stop_token_ids=tuple(ids),
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.num_logprobs(),
            **{name: value for name, value in given.items() if value is not None},
        )
        request = Request(id=request_id, prompt=prompt, sampling=sampling)
        request.check(ready.vocab_size, ready.max_context)
    except ValueError as error:
        raise ApiError.of(error) from None
    return request
