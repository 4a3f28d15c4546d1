"""The bodies that clients send: OpenAI's API with vLLM's extensions of it. null means the same as leaving a field out.

The types say what is allowed, as far as that does not depend on anything else; /openapi.json is made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from splash_trt.frontend.errors import ApiError
from splash_trt.request import MAX_LOGPROBS, MAX_STOP_IDS

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TOOLS = 128
MAX_CHOICE_TEXTS = 1024

Count = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a body. An unknown field is an error, since a misspelt one would otherwise go unnoticed."""


class StreamOptions(Part, frozen=True, kw_only=True):
    include_usage: bool = False
    """Send one more chunk at the end, with the token counts."""
    continuous_usage_stats: bool = False
    """Send the counts so far with every chunk."""


class StructuredOutputs(Part, frozen=True, kw_only=True):
    """What the answer has to be; one of these."""

    json: dict[str, Any] | str | None = None
    """A JSON Schema, or its text."""
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)] | None = None
    grammar: str | None = None
    """In llguidance's dialect of Lark."""
    json_object: bool | None = None


class JsonSchema(Part, frozen=True, kw_only=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Every schema is held to, whatever is said here."""


class ResponseFormat(Part, frozen=True, kw_only=True):
    """`json_schema`, `regex` or `grammar` goes with the type of its name."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class GenerationBody(Part, frozen=True, kw_only=True):
    """What completions and chats share."""

    model: str | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1: off."""
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    """Token id -> what is added to its logit."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text."""
    detokenize: bool | None = None
    """False: no text, only token ids."""
    return_token_ids: bool | None = None
    prompt_logprobs: Alternatives | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    """Taken and not used, as `metadata` and the three after it."""
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wants_text(self) -> bool:
        return self.detokenize is not False

    @property
    def stops(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if stop and not self.wants_text:
            raise ApiError("stop: stop strings need text, so detokenize must not be false", param="stop")
        return tuple(stop)

    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each chosen token; None: no log-probabilities at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options: allowed with stream true only", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs: not with stream true; ask for the whole answer"
            raise ApiError(message, param="prompt_logprobs")


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0: with echo only."""
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.suffix:
            message = "suffix: text after the answer is not served; put all of the context into the prompt"
            raise ApiError(message, param="suffix", code="unsupported_value")
        if self.best_of not in (None, 1, self.num_choices):
            message = f"best_of: {self.best_of} is not allowed; ask for n answers and choose among them"
            raise ApiError(message, param="best_of", code="unsupported_value")
        for field in ("max_tokens", "max_completion_tokens"):
            if getattr(self, field) == 0 and not self.echo:
                raise ApiError(f"{field}: 0 is not allowed; it must be at least 1, unless echo is true", param=field)

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


class LayoutBody(Part, frozen=True):
    """POST /v1/layout."""

    layout: str
    pin: bool = False

    def check(self, layouts: tuple[str, ...]) -> None:
        allowed = ", ".join((*layouts, "auto"))
        if self.layout not in (*layouts, "auto"):
            raise ApiError(f"layout: {self.layout!r} is not allowed; it must be one of {allowed}", param="layout")
        if self.layout == "auto" and self.pin:
            raise ApiError("pin: 'auto' lets the layout follow the load, so it cannot be pinned", param="pin")
