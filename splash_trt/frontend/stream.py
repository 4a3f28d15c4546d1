"""From a request's token deltas to what its client sees: text up to a stop string, in pieces that are safe to show."""

from __future__ import annotations

from dataclasses import dataclass, field

from splash_trt.frontend.tokenizer import Detokenizer
from splash_trt.request import FinishReason, TokenDelta, TokenLogprob


class StopScanner:
    """Finds the first stop string in text that comes in pieces; its answer does not depend on how the text is cut.

    First is the one that ends first, and of those that end together the longest.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_characters = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that no stop string can begin in any more, whether one was found). Nothing may come after a find."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        cut = self._first_possible_start(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
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
    """`offset`: characters of the answer before this token."""

    logprob: TokenLogprob
    offset: int


@dataclass
class Piece:
    """What of one answer can be sent now. Tokens whose text is held back come with an earlier piece than it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)
    finish: str | None = None


class Answer:
    """One request's answer as it grows. Without a detokenizer it has no text."""

    def __init__(self, detokenizer: Detokenizer | None, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._piece = Piece()
        self._num_characters = 0
        self.num_tokens = 0
        self.finish: str | None = None
        """"stop" or "length" once it is complete, be it by a stop string that the engine does not know of."""

    def add(self, delta: TokenDelta) -> None:
        """Tokens that complete a stop string end the answer; the delta's others are dropped."""
        for i, token in enumerate(delta.tokens):
            self.num_tokens += 1
            self._piece.tokens.append(token)
            if delta.logprobs:
                self._piece.logprobs.append(ShownLogprob(delta.logprobs[i], self._num_characters))
            ends_it = delta.finish is FinishReason.STOP and i == len(delta.tokens) - 1
            # The token that stopped the engine is a stop token: it has no place in the text.
            if self._detokenizer is not None and not ends_it and self._show(self._detokenizer.push(token)):
                return
        if delta.finish is None:
            return
        if self._detokenizer is None or not self._show(self._detokenizer.flush()):
            self._piece.text += self._scanner.flush()
            self._finish(delta.finish.value)

    def take(self) -> Piece:
        """What has become safe to send since the last call."""
        piece, self._piece = self._piece, Piece()
        return piece

    def _show(self, text: str) -> bool:
        """True if a stop string was found, which ends the answer."""
        self._num_characters += len(text)
        shown, found = self._scanner.push(text)
        self._piece.text += shown
        if found:
            self._finish("stop")
        return found

    def _finish(self, reason: str) -> None:
        self.finish = self._piece.finish = reason
