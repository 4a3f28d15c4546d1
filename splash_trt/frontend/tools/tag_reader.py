"""What the readers of tool calls share: a state for each place in the text, and what is under way there."""

from __future__ import annotations

from splash_trt.frontend.tools.arguments import Arguments
from splash_trt.frontend.tools.events import CallArguments, Content, Cutter, Event, Trimmer


class TagReader:
    """A subclass has a method `_in_STATE(events)` for each state: it takes what the cutter gives, adds what became
    certain to `events`, and returns False when it needs more text. The first state is "content"."""

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
        """A call that is cut off stays as far as it came; a name that is cut off is nobody's."""
        events: list[Event] = []
        rest = self._cutter.rest()
        if self._state == "content":
            self._say(self._content.push(rest) + ("" if self._num_calls else self._content.rest()), events)
        else:
            self._cut_off(rest, events)
        return events

    def _cut_off(self, rest: str, events: list[Event]) -> None:
        """The text ends with `rest` in a state other than content."""
        raise NotImplementedError

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))

    def _more(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(text))
