"""Formats answers as OpenAI's responses, for completions and for chats, whole and as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from splash_trt.frontend.responses import (
    AssistantMessage,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionDelta,
    MadeFunctionCall,
    MadeToolCall,
    MessageDelta,
    PromptLogprob,
    PromptLogprobs,
    ShownTokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from splash_trt.frontend.stream import CallDelta, Piece, ShownLogprob
from splash_trt.request import TokenLogprob

DONE = b"data: [DONE]\n\n"
MARK = "\0what came\0"
LEAST_LOGPROB = -9999.0
"""In place of -inf, which JSON does not have; the number is vLLM's."""

Counts = Callable[[], Usage]
"""Tokens so far."""

_encode = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data


@dataclass(frozen=True)
class Wanted:
    """What a request asks for in addition to the text."""

    logprobs: int | None
    """How many alternatives to each token; None: no log-probabilities."""
    prompt_logprobs: int | None
    token_ids: bool
    usage_at_end: bool
    usage_always: bool


class Shape:
    """The form of one response. name_token, token_bytes: of tokens in log-probabilities."""

    def __init__(
        self,
        response_id: str,
        model: str,
        name_token: Callable[[int], str],
        token_bytes: Callable[[int], bytes] | None,
        wanted: Wanted,
    ) -> None:
        self.id = response_id
        self._name = name_token
        self._token_bytes = token_bytes
        self._wanted = wanted
        self._head: tuple[str, int, str] = (response_id, int(time.time()), model)
        with_usage = wanted.usage_at_end or wanted.usage_always
        self._is_plain = wanted.logprobs is None and not wanted.token_ids and not with_usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the bytes before and after the text in an event that has only text."""

    def opening(self, num_choices: int, counts: Counts) -> bytes:
        """What a stream begins with."""
        return b""

    def chunk(self, index: int, piece: Piece, counts: Counts) -> bytes:
        """An event with what came for choice `index`; empty if there is nothing to send."""
        if self._is_plain and piece.text and not (piece.finish or piece.reasoning or piece.calls):
            before, after = self._frames.get(index) or self._frame(index)
            return b"%b%b%b" % (before, _encode(piece.text), after)
        shown = piece.text or piece.reasoning or piece.calls or piece.finish
        if not (shown or piece.logprobs or (piece.tokens and self._wanted.token_ids)):
            return b""
        return self._event([self._part(index, piece)], counts)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """The bytes around a choice's text, from an event about MARK, so that all events have the same form."""
        # The last MARK is the text: what a client or a deployment has chosen, such as the model's name, precedes it.
        before, _, after = self._event([self._part(index, Piece(text=MARK))], None).rpartition(_encode(MARK))
        self._frames[index] = before, after
        return before, after

    def closing(self, counts: Counts) -> bytes:
        """What a stream ends with."""
        return (self._event([], None, counts()) if self._wanted.usage_at_end else b"") + DONE

    def whole(self, pieces: Sequence[Piece], counts: Usage) -> bytes:
        """Everything in one body."""
        raise NotImplementedError

    def _part(self, index: int, piece: Piece) -> Any:
        raise NotImplementedError

    def _chunk(self, choices: list[Any], usage: Usage | None | UnsetType) -> Any:
        raise NotImplementedError

    def _event(self, choices: list[Any], counts: Counts | None, last: Usage | None = None) -> bytes:
        usage: Usage | None | UnsetType = UNSET
        if self._wanted.usage_at_end or self._wanted.usage_always:
            usage = last or (counts() if self._wanted.usage_always and counts is not None else None)
        return event(_encode(self._chunk(choices, usage)))

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.tokens if self._wanted.token_ids else UNSET

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobs | UnsetType:
        num_top = self._wanted.prompt_logprobs
        if num_top is None:
            return UNSET
        return [None, *(self._of_prompt_token(known, num_top) for known in piece.prompt_logprobs)]

    def _of_prompt_token(self, known: TokenLogprob, num_top: int) -> dict[str, PromptLogprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(known.top, 1)}
        shown = {known.token: known.logprob, **dict(known.top[:num_top])}
        return {
            str(token): PromptLogprob(_finite(value), ranks.get(token), self._name(token))
            for token, value in shown.items()
        }


class CompletionShape(Shape):
    def whole(self, pieces: Sequence[Piece], counts: Usage) -> bytes:
        choices = [
            msgspec.structs.replace(self._part(i, piece), prompt_logprobs=self._prompt_logprobs(piece))
            for i, piece in enumerate(pieces)
        ]
        return msgspec.json.encode(self._chunk(choices, counts))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType) -> Completion:
        return Completion(*self._head, "text_completion", choices, usage)

    def _part(self, index: int, piece: Piece) -> CompletionChoice:
        shown = None if self._wanted.logprobs is None else self._show(piece.logprobs)
        finish: Any = piece.finish
        return CompletionChoice(index, piece.text, shown, finish, self._token_ids(piece))

    def _show(self, logprobs: Sequence[ShownLogprob]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._name(shown.logprob.token) for shown in logprobs],
            token_logprobs=[None if shown.first else _finite(shown.logprob.logprob) for shown in logprobs],
            top_logprobs=[self._top(shown) for shown in logprobs],
            text_offset=[shown.offset for shown in logprobs],
        )

    def _top(self, shown: ShownLogprob) -> dict[str, float] | None:
        """{name: log-probability} of the alternatives and of the token; None for an echoed prompt's first token."""
        if shown.first:
            return None
        known = shown.logprob
        top = {self._name(token): _finite(value) for token, value in known.top}
        top.setdefault(self._name(known.token), _finite(known.logprob))
        return top


class ChatShape(Shape):
    def opening(self, num_choices: int, counts: Counts) -> bytes:
        delta = MessageDelta(role="assistant", content="")
        return self._event([ChatChunkChoice(i, delta, None, None) for i in range(num_choices)], counts)

    def whole(self, pieces: Sequence[Piece], counts: Usage) -> bytes:
        choices = [
            ChatChoice(i, self._message(piece), self._show(piece.logprobs), *self._rest(piece))
            for i, piece in enumerate(pieces)
        ]
        of_prompt = self._prompt_logprobs(pieces[0])
        return msgspec.json.encode(Chat(*self._head, "chat.completion", choices, counts, of_prompt))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None | UnsetType) -> ChatChunk:
        return ChatChunk(*self._head, "chat.completion.chunk", choices, usage)

    def _part(self, index: int, piece: Piece) -> ChatChunkChoice:
        delta = MessageDelta(
            content=piece.text or UNSET,
            reasoning_content=piece.reasoning or UNSET,
            reasoning=piece.reasoning or UNSET,
            tool_calls=[_call_delta(call) for call in piece.calls] or UNSET,
        )
        return ChatChunkChoice(index, delta, self._show(piece.logprobs), *self._rest(piece))

    def _message(self, piece: Piece) -> AssistantMessage:
        return AssistantMessage(
            role="assistant",
            content=piece.text or (None if piece.calls else ""),
            reasoning_content=piece.reasoning or UNSET,
            reasoning=piece.reasoning or UNSET,
            tool_calls=[_call(call) for call in piece.calls] or UNSET,
        )

    def _rest(self, piece: Piece) -> tuple[Any, list[int] | UnsetType]:
        return piece.finish, self._token_ids(piece)

    def _show(self, logprobs: Sequence[ShownLogprob]) -> ChatLogprobs | None:
        if self._wanted.logprobs is None:
            return None
        return ChatLogprobs([self._entry(shown) for shown in logprobs])

    def _entry(self, shown: ShownLogprob) -> ShownTokenLogprob:
        known = shown.logprob
        top = [TopLogprob(*self._named(token, value)) for token, value in known.top]
        return ShownTokenLogprob(*self._named(known.token, known.logprob), top)

    def _named(self, token: int, logprob: float) -> tuple[str, float, list[int] | None]:
        spelled = None if self._token_bytes is None else list(self._token_bytes(token))
        return self._name(token), _finite(logprob), spelled


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _call(call: CallDelta) -> MadeToolCall:
    assert call.id is not None and call.name is not None, "a whole answer has calls from their beginning"
    return MadeToolCall(call.id, MadeFunctionCall(call.name, call.arguments))


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.id is None or call.name is None:
        return ToolCallDelta(call.index, FunctionDelta(call.arguments))
    return ToolCallDelta(call.index, FunctionDelta(call.arguments, call.name), call.id, "function")
