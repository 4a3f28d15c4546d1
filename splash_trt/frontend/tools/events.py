"""What the text of an answer turns out to be, piece by piece, and the cutting that all its readers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins; what follows as CallArguments is its arguments."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class Reader(Protocol):
    """Joined, its events do not depend on how the text was cut; and no event holds a part of a tag."""

    def push(self, text: str) -> list[Event]:
        """What became certain with this text."""

    def flush(self) -> list[Event]:
        """The rest, when no more text comes."""


class Cutter:
    """Text that comes in pieces, taken out up to a tag."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> None:
        self._held += text

    def until(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """(text before the first tag, the tag), both gone from here; or (text that no tag can begin in, None).

        Of tags that begin at the same place, one that is the start of another does not go well with it.
        """
        found = [(start, tag) for tag in tags if (start := self._held.find(tag)) >= 0]
        if found:
            start, tag = min(found)
            text, self._held = self._held[:start], self._held[start + len(tag) :]
            return text, tag
        cut = self._first_possible_start(tags)
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def rest(self) -> str:
        """All that is left."""
        rest, self._held = self._held, ""
        return rest

    def _first_possible_start(self, tags: Sequence[str]) -> int:
        size = len(self._held)
        for start in range(max(0, size - max(map(len, tags)) + 1), size):
            rest = self._held[start:]
            if any(tag.startswith(rest) for tag in tags):
                return start
        return size


class Trimmer:
    """Text that comes in pieces, without the white space at its start and, where `end` is asked for, at its end."""

    def __init__(self, start: bool = True) -> None:
        """start: drop white space at the start."""
        self._at_start = start
        self._space = ""

    def push(self, text: str) -> str:
        """All but white space that may turn out to be at the end."""
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown

    def end(self) -> None:
        """The white space at the end is dropped, and so is what comes next."""
        self._space, self._at_start = "", True

    def rest(self) -> str:
        """The white space at the end, when it is wanted after all."""
        space, self._space = self._space, ""
        return space
