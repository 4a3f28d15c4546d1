"""Makes the values of Triton's output tensors of a request's events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .inputs import Question
from .protocol import Event, Token


class Answer:
    """One request's answer as it grows; each response has what came since the one before."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._text = question.prefix
        self._num_tokens = 0
        self._tokens: list[Token] = []
        self._num_prompt_tokens = 0
        self._sum = 0.0
        self._finish: str | None = None

    @property
    def complete(self) -> bool:
        return self._finish is not None

    @property
    def has_news(self) -> bool:
        """Whether to send a response: there is text, or the end. Tokens whose text is held back wait for it."""
        return self.complete or bool(self._question.stream and self._text)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            self._text += event.text
            self._num_tokens += event.num_tokens
            self._tokens += event.logprobs
            self._num_prompt_tokens = event.num_prompt_tokens or self._num_prompt_tokens
            self._finish = event.finish

    def take(self) -> dict[str, Any]:
        """{output name: its values}, as arrays of the types and ranks in config.pbtxt."""
        tokens, num_tokens, text = self._tokens, self._num_tokens, self._text
        self._tokens, self._num_tokens, self._text = [], 0, ""
        self._sum += sum(token.logprob for token in tokens)
        asked = "logprobs" in self._question.body
        values = {
            "text_output": _strings(text),
            "finish_reason": _strings(str(self._finish)),
            "cumulative_logprob": np.array([self._sum], np.float32),
            "logprobs": _strings(json.dumps([_by_id(token) for token in tokens]) if asked else "null"),
            "num_input_tokens": np.array([self._num_prompt_tokens], np.uint32),
            "num_output_tokens": np.array([num_tokens], np.uint32),
            "cum_log_probs": np.array([self._sum], np.float32),
            "output_log_probs": np.array([[token.logprob for token in tokens]], np.float32),
            "sequence_index": np.array([0], np.int32),
        }
        always = ("text_output", "sequence_index")
        return {name: value for name, value in values.items() if name in always or name in self._question.outputs}


def _strings(text: str) -> Any:
    return np.array([text.encode()], dtype=np.object_)


def _by_id(token: Token) -> dict[str, dict[str, Any]]:
    """A token's log-probabilities by id, as in the vLLM backend. Ranks beyond the likeliest are unknown: null."""
    chosen = {str(token.id): {"logprob": token.logprob, "rank": None, "decoded_token": token.name}}
    best = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": name}
        for rank, (token_id, name, logprob) in enumerate(token.top, 1)
    }
    return {**chosen, **best}
