"""The types of answers in OpenAI's two text APIs, whole and in chunks; /openapi.json is made from them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

CompletionFinish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt: int, num_output: int) -> Usage:
        return cls(num_prompt, num_output, num_prompt + num_output)


class PromptLogprob(msgspec.Struct, frozen=True):
    """As vLLM names it. rank: among all tokens, 1 is the likeliest; null: beyond those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One for each token of the prompt, keyed by token id; null for the first, before which there is nothing."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """token_logprobs and top_logprobs are null for an echoed prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the text before each token."""


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """Whole, and also each chunk of a stream; a last chunk with the usage has no choices."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ShownTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ShownTokenLogprob]


class MadeFunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class MadeToolCall(msgspec.Struct, frozen=True):
    id: str
    function: MadeFunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, frozen=True):
    """The same reasoning comes under the two names that clients read."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MadeToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    """Its name comes once; the arguments are to be joined."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
