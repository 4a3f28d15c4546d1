"""The base of readers of tool calls: a state machine over the tags in the text."""

from __future__ import annotations

from splash_trt.frontend.tools.arguments import Arguments
from splash_trt.frontend.tools.events import CallArguments, Content, Cutter, Event, Trimmer


class TagReader:
    """A subclass has a method `_in_STATE(events)` for each state: it takes text from the cutter, adds the events that
    are certain to `events`, and returns False if it needs more text. The first state is "content"."""

    def __init__(self) -> None:
        self._cutter = Cutter()
        self._content = Trimmer(start=False)
        self._state = "content"
        self._head = ""  # text of the tag, name, key or value under way
        self._arguments = Arguments()
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        self._cutter.push(text)
        events: list[Event] = []
        going = True
        while going:
            going = getattr(self, f"_in_{self._state}")(events)
        return events

    def flush(self) -> list[Event]:
        """Ends the text. Of a call that is cut off, what came is kept; one whose name is cut off is dropped."""
        events: list[Event] = []
        rest = self._cutter.rest()
        if self._state == "content":
            self._say(self._content.push(rest) + ("" if self._num_calls else self._content.rest()), events)
        else:
            self._cut_off(rest, events)
        return events

    def _cut_off(self, rest: str, events: list[Event]) -> None:
        """Adds events when the text ends, with `rest` left, in a state other than content."""
        raise NotImplementedError

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))

    def _more(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(text))
