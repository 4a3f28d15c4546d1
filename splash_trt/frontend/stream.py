"""Makes of a request's token deltas what its client sees: text up to a stop string, in pieces that are safe to show."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace

import msgspec

from splash_trt.frontend.tokenizer import Detokenizer
from splash_trt.frontend.tools.events import CallArguments, CallBegin, Content, Event, Reader, Reasoning
from splash_trt.request import FinishReason, TokenDelta, TokenLogprob


class StopScanner:
    """Finds the first stop string in text that comes in pieces; the result does not depend on how the text is cut.

    The first is the one that ends first, and of those that end together the longest.
    """

    def __init__(self, stops: tuple[str, ...], keep: bool = False) -> None:
        """keep: whether the stop string that was found is part of the text."""
        self._stops = stops
        self._keep = keep
        self._first_characters = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._num_exempt = 0
        """Characters of `_held` in which no stop string may end."""

    def push(self, text: str, exempt: bool = False) -> tuple[str, bool]:
        """Takes more text; returns (text that can be shown, as no stop string can begin in it any more; whether one was
        found). Must not be called again after one was found.

        exempt: a stop string may begin in this text, but not end in it.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        begin = len(text) if exempt else self._num_exempt
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop, max(0, begin + 1 - len(stop)))) >= 0
        ]
        if found:
            self._held = ""
            end, start = min(found)
            return text[: end if self._keep else start], True
        cut = self._first_possible_start(text)
        self._held = text[cut:]
        self._num_exempt = max(0, begin - cut)
        return text[:cut], False

    def flush(self) -> str:
        """To be called when no more text comes: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                rest = text[start:]
                if any(stop.startswith(rest) for stop in self._stops):
                    return start
        return len(text)


@dataclass(frozen=True)
class ShownLogprob:
    """A token's log-probability. offset: characters of the text before the token. first: it is the first token of the
    sequence, so it has none, and `logprob` has no meaning."""

    logprob: TokenLogprob
    offset: int
    first: bool = False


@dataclass
class CallDelta:
    """More of tool call number `index`. `name` and `id` are given at its beginning only."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass
class Piece:
    """The part of an answer that can be sent now. Tokens may come in an earlier piece than their text, if that is held
    back."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class Echo:
    """The answer is to begin with the prompt. num_logprobs: with log-probabilities, and so many alternatives to each
    token; None: without."""

    prompt: tuple[int, ...]
    num_logprobs: int | None
    alone: bool
    """Whether the prompt is all that is wanted."""


class Answer:
    """One request's answer as it grows. Without a detokenizer it has no text.

    reader: splits the text into content, reasoning and tool calls. max_calls: further calls are dropped.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        scanner: StopScanner,
        *,
        reader: Reader | None = None,
        max_calls: int | None = None,
        calls_are_stops: bool = False,
        echo: Echo | None = None,
        min_tokens: int = 0,
    ) -> None:
        """calls_are_stops: the finish reason of an answer with calls is "stop", as of one without, not "tool_calls".

        min_tokens: no stop string may end in the text of the first so many tokens, as in vLLM.
        """
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._reader = reader
        self._max_calls = max_calls
        self._calls_are_stops = calls_are_stops
        self._echo = echo
        self._min_tokens = min_tokens
        self._piece = Piece()
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_characters = 0
        self._num_shown = 0
        """The characters among these that are neither held back nor cut off by a stop string."""
        self._num_calls = 0
        self.num_tokens = 0
        self.finish: str | None = None
        """"stop", "length" or "tool_calls" once the answer is complete, be it by the engine or by a stop string, which
        the engine does not know."""

    def add(self, delta: TokenDelta) -> None:
        """Takes more tokens. One that completes a stop string ends the answer; the delta's later tokens are dropped."""
        self._piece.prompt_logprobs += delta.prompt_logprobs
        if self._echo is not None and not self._show_prompt(self._echo, delta):
            return
        for i, token in enumerate(delta.tokens):
            self.num_tokens += 1
            self._piece.tokens.append(token)
            if delta.logprobs:
                self._piece.logprobs.append(ShownLogprob(delta.logprobs[i], self._num_characters))
            ends_it = delta.finish is FinishReason.STOP and i == len(delta.tokens) - 1
            # The token that stopped the engine is a stop token, which is not part of the text.
            if self._detokenizer is not None and not ends_it and self._show(self._detokenizer.push(token)):
                return
        if delta.finish is None:
            return
        if self._detokenizer is None or not self._show(self._detokenizer.flush()):
            self._sort(self._scanner.flush())
            self._finish(delta.finish.value)

    def take(self) -> Piece:
        """What has become safe to send since the last call."""
        piece, self._piece = self._piece, Piece()
        return piece

    def _show_prompt(self, echo: Echo, delta: TokenDelta) -> bool:
        """Shows the prompt once its log-probabilities have come, if they are wanted. Returns whether the delta's tokens
        are to be shown next: not before that, nor if only the prompt is wanted."""
        self._prompt_logprobs += delta.prompt_logprobs
        wanted = None if echo.num_logprobs is None else len(echo.prompt) - 1
        if wanted is not None and len(self._prompt_logprobs) < wanted:
            assert not delta.tokens, "tokens came before the prompt's log-probabilities"
            return False
        for i, token in enumerate(echo.prompt):
            if echo.num_logprobs is not None:
                known = TokenLogprob(token, 0.0) if i == 0 else self._prompt_logprobs[i - 1]
                known = msgspec.structs.replace(known, top=known.top[: echo.num_logprobs])
                self._piece.logprobs.append(ShownLogprob(known, self._num_characters, first=i == 0))
            if self._detokenizer is not None:
                text = self._detokenizer.push(token)
                self._num_characters += len(text)
                self._num_shown += len(text)
                self._piece.text += text
        self._echo = None
        if echo.alone:
            self._piece.text += "" if self._detokenizer is None else self._detokenizer.flush()
            self._finish("length")
        return not echo.alone

    def _show(self, text: str) -> bool:
        """Takes more text; returns whether a stop string was found, which ends the answer."""
        if not text:
            return False
        self._num_characters += len(text)
        shown, found = self._scanner.push(text, exempt=self.num_tokens <= self._min_tokens)
        self._sort(shown)
        if found:
            # Tokens that are cut off, wholly or in part, get the text's end as their offset at most.
            self._piece.logprobs = [
                replace(known, offset=min(known.offset, self._num_shown)) for known in self._piece.logprobs
            ]
            self._finish("stop")
        return found

    def _sort(self, text: str) -> None:
        if not text:
            return
        self._num_shown += len(text)
        if self._reader is None:
            self._piece.text += text
        else:
            self._take_events(self._reader.push(text))

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._piece.text += event.text
            elif isinstance(event, Reasoning):
                self._piece.reasoning += event.text
            elif isinstance(event, CallBegin):
                self._num_calls += 1
                if self._wants_call:
                    name = f"call_{uuid.uuid4().hex[:24]}"
                    self._piece.calls.append(CallDelta(self._num_calls - 1, name, event.name, ""))
            elif self._wants_call:
                self._more_arguments(event)

    @property
    def _wants_call(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _more_arguments(self, event: CallArguments) -> None:
        calls, index = self._piece.calls, self._num_calls - 1
        if not calls or calls[-1].index != index:
            calls.append(CallDelta(index, None, None, ""))
        calls[-1].arguments += event.text

    def _finish(self, reason: str) -> None:
        if self._reader is not None:
            self._take_events(self._reader.flush())
        is_call = reason == "stop" and self._num_calls > 0 and not self._calls_are_stops
        self.finish = self._piece.finish = "tool_calls" if is_call else reason
