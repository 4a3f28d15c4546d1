"""Tool calls as DeepSeek's models write them.

V3, R1      <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME      (a fence of JSON follows, on lines
            of their own)<|tool_call_end|> ... <|tool_calls_end|>
V3.1        <|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>JSON<|tool_call_end|> ... <|tool_calls_end|>
V3.2        <|DSML|function_calls> <|DSML|invoke name="NAME"> <|DSML|parameter name="KEY" string="true|false">VALUE
            </|DSML|parameter> ... </|DSML|invoke> ... </|DSML|function_calls>; also JSON in place of the parameters

where | is U+FF5C and _ is U+2581. Sources: the models' chat templates, and encoding/README.md of DeepSeek-V3.2.
"""

from __future__ import annotations

import re

from splash_trt.frontend.tools.arguments import Arguments
from splash_trt.frontend.tools.events import CallBegin, Event, Trimmer
from splash_trt.frontend.tools.tag_reader import TagReader

CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
DSML = "\uff5cDSML\uff5c"
DSML_CALLS = f"<{DSML}function_calls>"
DSML_CALLS_END = f"</{DSML}function_calls>"
INVOKE, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, DSML)

FENCE, FENCE_END = "```json", "```"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DeepSeekReader(TagReader):
    """Reads both kinds of tags; the text shows which is used."""

    def __init__(self) -> None:
        super().__init__()
        self._json = Trimmer()
        self._is_string = True

    def _cut_off(self, rest: str, events: list[Event]) -> None:
        if self._state in ("json", "fenced_json"):
            self._more(self._json.push(rest), events)
        elif self._state == "value" and self._is_string:
            self._more(self._arguments.string(rest), events)

    def _in_content(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([CALLS_BEGIN, DSML_CALLS])
        self._say(self._content.push(text), events)
        if tag is not None:
            self._content.end()
            self._state = "calls" if tag == CALLS_BEGIN else "invokes"
        return tag is not None

    def _in_calls(self, events: list[Event]) -> bool:
        _, tag = self._cutter.until([CALL_BEGIN, CALLS_END])
        if tag is not None:
            self._head = ""
            self._state = "name" if tag == CALL_BEGIN else "content"
        return tag is not None

    def _in_name(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([SEPARATOR, CALL_END])
        self._head += text
        if tag == CALL_END:
            self._state = "calls"
        elif tag == SEPARATOR:
            self._state = "after_separator" if self._head.strip() == "function" else "json"
            if self._state == "json":
                self._begin(self._head, events)
            self._head = ""
        return tag is not None

    def _in_after_separator(self, events: list[Event]) -> bool:
        """In V3 the name is next; in V3.1, if the function itself is called "function", its JSON is."""
        text, tag = self._cutter.until(["{", FENCE, CALL_END])
        self._head += text
        if tag == CALL_END:
            self._state = "calls"
        elif tag == FENCE:
            self._begin(self._head, events)
            self._state = "fenced_json"
        elif tag == "{":
            self._begin(self._head.strip() or "function", events)
            self._more(self._json.push("{"), events)
            self._state = "json"
        return tag is not None

    def _in_json(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([CALL_END])
        self._more(self._json.push(text), events)
        self._state = "json" if tag is None else "calls"
        return tag is not None

    def _in_fenced_json(self, events: list[Event]) -> bool:
        """Ends at the fence right before the end of the call, since another one may be part of a string."""
        text, tag = self._cutter.until([f"\n{FENCE_END}{CALL_END}", f"{FENCE_END}{CALL_END}", CALL_END])
        self._more(self._json.push(text), events)
        self._state = "fenced_json" if tag is None else "calls"
        return tag is not None

    def _in_invokes(self, events: list[Event]) -> bool:
        _, tag = self._cutter.until([INVOKE, DSML_CALLS_END])
        if tag is not None:
            self._head = ""
            self._state = "invoke_tag" if tag == INVOKE else "content"
        return tag is not None

    def _in_invoke_tag(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([">"])
        self._head += text
        if tag is not None:
            self._begin(dict(_ATTRIBUTE.findall(self._head)).get("name", ""), events)
            self._arguments = Arguments()
            self._state = "invoke"
        return tag is not None

    def _in_invoke(self, events: list[Event]) -> bool:
        _, tag = self._cutter.until([PARAMETER, INVOKE_END, "{"])
        if tag == PARAMETER:
            self._head = ""
            self._state = "parameter_tag"
        elif tag == INVOKE_END:
            self._more(self._arguments.end(), events)
            self._state = "invokes"
        elif tag == "{":
            self._more(self._json.push("{"), events)
            self._state = "invoke_json"
        return tag is not None

    def _in_invoke_json(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([INVOKE_END])
        self._more(self._json.push(text), events)
        self._state = "invoke_json" if tag is None else "invokes"
        return tag is not None

    def _in_parameter_tag(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([">"])
        self._head += text
        if tag is not None:
            attributes = dict(_ATTRIBUTE.findall(self._head))
            self._is_string = attributes.get("string") != "false"
            self._head = ""
            self._more(self._arguments.key(attributes.get("name", "")), events)
            self._state = "value"
        return tag is not None

    def _in_value(self, events: list[Event]) -> bool:
        text, tag = self._cutter.until([PARAMETER_END])
        if self._is_string:
            self._more(self._arguments.string(text), events)
        else:
            self._head += text
        if tag is not None:
            ended = self._arguments.end_string() if self._is_string else self._arguments.value(self._head, None)
            self._more(ended, events)
            self._state = "invoke"
        return tag is not None

    def _begin(self, name: str, events: list[Event]) -> None:
        self._num_calls += 1
        self._json = Trimmer()
        events.append(CallBegin(name.strip()))
