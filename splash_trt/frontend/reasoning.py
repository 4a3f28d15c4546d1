"""Splits an answer into what the model thought, between <think> and </think>, and what it says."""

from __future__ import annotations

from splash_trt.frontend.tools.events import Content, Cutter, Event, Reasoning, Trimmer

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered chat ends with the opening tag, so that the answer begins inside the thoughts."""
    return prompt.rstrip().endswith(OPEN)


def closed(prompt: str) -> str:
    """The prompt with closed thoughts, for answers that must have a certain form from their first token on."""
    return prompt + CLOSE if opens_thinking(prompt) else prompt


class ReasoningReader:
    """Splits thoughts from content. White space around the thoughts is in neither; without tags, all is content.

    Some templates write the opening tag into the prompt; some models write it themselves, first of all.
    """

    def __init__(self, inside: bool) -> None:
        """inside: whether the prompt ends with the opening tag."""
        self._cutter = Cutter()
        self._thoughts = Trimmer()
        self._inside = inside
        self._may_open = not inside
        self._start = ""  # white space before an opening tag that may still come
        self._content = Trimmer(start=False)

    def push(self, text: str) -> list[Event]:
        self._cutter.push(text)
        events: list[Event] = []
        if self._may_open:
            events += self._look_for_opening()
        if self._inside:
            thought, tag = self._cutter.until([CLOSE])
            shown = self._thoughts.push(thought)
            events += [Reasoning(shown)] if shown else []
            if tag is not None:
                self._inside = False
                self._content = Trimmer()
        if not self._inside and not self._may_open:
            said = self._content.push(self._cutter.rest())
            events += [Content(said)] if said else []
        return events

    def flush(self) -> list[Event]:
        rest = self._cutter.rest()
        if self._inside:
            shown = self._thoughts.push(rest)
            return [Reasoning(shown)] if shown else []
        said = self._content.push(self._start + rest) + self._content.rest()
        return [Content(said)] if said else []

    def _look_for_opening(self) -> list[Event]:
        text, tag = self._cutter.until([OPEN])
        text = self._start + text
        self._start = ""
        if text.strip():  # the answer begins with content
            self._may_open = False
            said = self._content.push(text + (tag or "") + self._cutter.rest())
            return [Content(said)] if said else []
        if tag is None:
            self._start = text
        else:
            self._may_open, self._inside = False, True
        return []
