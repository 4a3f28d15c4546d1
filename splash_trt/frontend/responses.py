"""The shapes of answers in OpenAI's two text APIs, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from splash_trt.frontend.stream import Piece, ShownLogprob

DONE = b"data: [DONE]\n\n"

NameToken = Callable[[int], str]


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data


def usage(num_prompt: int, num_output: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


class Shape:
    """One response. name_token and token_bytes say how log-probabilities name tokens."""

    object_name: str
    chunk_object_name: str

    def __init__(
        self,
        response_id: str,
        model: str,
        name_token: NameToken,
        token_bytes: Callable[[int], bytes] | None,
        *,
        logprobs: bool,
        token_ids: bool,
        usage_chunk: bool,
    ) -> None:
        self.id = response_id
        self._name = name_token
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._usage_chunk = usage_chunk
        self._head = {"id": response_id, "created": int(time.time()), "model": model}

    def opening(self, num_choices: int) -> bytes:
        """What a stream begins with."""
        return b""

    def chunk(self, index: int, piece: Piece) -> bytes:
        """An event with what came for choice `index`; empty if there is nothing to tell."""
        if not (piece.text or piece.finish or (piece.tokens and (self._token_ids or piece.logprobs))):
            return b""
        choice = {"index": index, **self._delta(piece), **self._rest(piece)}
        return self._event([choice])

    def closing(self, counts: dict[str, int]) -> bytes:
        """What a stream ends with."""
        if not self._usage_chunk:
            return DONE
        body = {**self._head, "object": self.chunk_object_name, "choices": [], "usage": counts}
        return event(msgspec.json.encode(body)) + DONE

    def whole(self, pieces: Sequence[Piece], counts: dict[str, int]) -> bytes:
        """Everything in one body."""
        choices = [{"index": i, **self._answer(piece), **self._rest(piece)} for i, piece in enumerate(pieces)]
        return msgspec.json.encode({**self._head, "object": self.object_name, "choices": choices, "usage": counts})

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        body = {**self._head, "object": self.chunk_object_name, "choices": choices}
        if self._usage_chunk:
            body["usage"] = None
        return event(msgspec.json.encode(body))

    def _rest(self, piece: Piece) -> dict[str, Any]:
        shown = self._show(piece.logprobs) if self._logprobs else None
        ids = {"token_ids": piece.tokens} if self._token_ids else {}
        return {"logprobs": shown, "finish_reason": piece.finish, **ids}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _answer(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _show(self, logprobs: Sequence[ShownLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionShape(Shape):
    object_name = chunk_object_name = "text_completion"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    _answer = _delta

    def _show(self, logprobs: Sequence[ShownLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._name(shown.logprob.token) for shown in logprobs],
            "token_logprobs": [shown.logprob.logprob for shown in logprobs],
            "top_logprobs": [{self._name(t): value for t, value in shown.logprob.top} for shown in logprobs],
            "text_offset": [shown.offset for shown in logprobs],
        }


class ChatShape(Shape):
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self, num_choices: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": i, "delta": delta, "finish_reason": None} for i in range(num_choices)])

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"delta": {"content": piece.text} if piece.text else {}}

    def _answer(self, piece: Piece) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": piece.text}}

    def _show(self, logprobs: Sequence[ShownLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(shown.logprob.token, shown.logprob.logprob),
                    "top_logprobs": [self._entry(token, value) for token, value in shown.logprob.top],
                }
                for shown in logprobs
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = None if self._token_bytes is None else list(self._token_bytes(token))
        return {"token": self._name(token), "logprob": logprob, "bytes": spelled}
