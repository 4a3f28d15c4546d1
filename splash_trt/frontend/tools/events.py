"""The events into which readers split an answer's text, and helpers that all readers share."""

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
    """A tool call begins; its arguments follow as CallArguments."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class Reader(Protocol):
    """Splits text that comes in pieces. Its events, joined, do not depend on the cuts; none holds part of a tag."""

    def push(self, text: str) -> list[Event]:
        """The events that are certain with this text."""

    def flush(self) -> list[Event]:
        """The remaining events, when no more text comes."""


class Cutter:
    """Collects text that comes in pieces, and gives it out up to a tag."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> None:
        self._held += text

    def until(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """Takes out and returns (text before the first tag, the tag), or (text in which no tag can begin, None).

        No tag may be the beginning of another.
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
        """Takes out all that is left."""
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
    """Removes white space from text that comes in pieces: at its start, and, by `end`, at its end."""

    def __init__(self, start: bool = True) -> None:
        """start: whether to drop white space at the start."""
        self._at_start = start
        self._space = ""

    def push(self, text: str) -> str:
        """The text, but for white space that may turn out to be at the end."""
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown

    def end(self) -> None:
        """Drops the white space at the end, and at the start of what comes next."""
        self._space, self._at_start = "", True

    def rest(self) -> str:
        """The white space at the end, if it is wanted after all."""
        space, self._space = self._space, ""
        return space
