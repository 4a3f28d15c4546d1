"""The form of all processes' logs: lines to stderr, each with the process's name.

No line has a prompt or an answer in it, whatever the level.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def configure(source: str, *, level: str = "info", form: str = "text") -> None:
    """Sets up logging in this process. source: its name, such as "frontend" or "rank 3". level, form: of LEVELS and
    FORMATS, or ValueError."""
    if level not in LEVELS:
        raise ValueError(f"log_level: {level!r} is not one of {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise ValueError(f"log_format: {form!r} is not one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(source) if form == "json" else TextLines(source))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Debug lines of libraries are not shown: they may contain what a client sent.
    for name in ("asyncio", "aiohttp", "urllib3", "opentelemetry"):
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLevelName(level.upper())))


def event(log: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Logs an event with fields: name=value pairs in text, keys in JSON. Fields that are None are left out."""
    if log.isEnabledFor(level):
        log.log(level, "%s", name, extra={"fields": {key: value for key, value in fields.items() if value is not None}})


class TextLines(logging.Formatter):
    """Lines such as: frontend: INFO text name=value …"""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        # One line per record, even if an error quotes line breaks.
        text = record.getMessage().replace("\n", "\\n")
        pairs = "".join(f" {name}={_value(value)}" for name, value in _fields(record).items())
        line = f"{self._source}: {record.levelname} {text}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, source, rank (of a rank), logger, message, and an event's fields."""

    def __init__(self, source: str) -> None:
        super().__init__()
        word, _, number = source.partition(" ")
        self._about: dict[str, object] = {"source": source}
        if word == "rank":
            self._about["rank"] = int(number)

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line |= self._about | {"logger": record.name, "message": record.getMessage()}
        line |= {name: value for name, value in _fields(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ",".join(f"{name}:{_value(part)}" for name, part in value.items()) or "none"
    text = str(value)
    plain = bool(text) and all(character.isalnum() or character in "-_.:/%+" for character in text)
    return text if plain else msgspec.json.encode(text).decode()


class SwitchLines:
    """Logs one line per switch, when all is known of it. `told` takes its Record (layout/switch.py) as plain values."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._pending: dict[str, object] | None = None
        self._logged_to = 0

    def told(self, record: dict[str, object]) -> None:
        """To be called with news of a switch. Switches come in order; one may come several times."""
        number = record.get("number")
        if not isinstance(number, int) or number <= self._logged_to or not record.get("ended"):
            return
        if self._pending is not None and self._pending["number"] != number:
            self.flush()
        self._pending = record
        # After a commit the stall is known one step later.
        if record.get("outcome") != "committed" or record.get("stall_s") is not None:
            self.flush()

    def flush(self) -> None:
        """To be called when no further step can complete what is known: logs the switch that waits, if there is one."""
        record, self._pending = self._pending, None
        if record is None:
            return
        number, states = record["number"], record.get("seconds_in")
        assert isinstance(number, int)
        self._logged_to = number
        named = ("number", "source", "target", "why", "outcome", "bytes_between_ranks", "bytes_inside_ranks")
        fields = {name: record.get(name) for name in (*named, "slowdown", "stall_s", "seconds_in")}
        seconds = sum(states.values()) if isinstance(states, dict) else None
        level = logging.INFO if record.get("outcome") == "committed" else logging.WARNING
        event(self._log, level, "switch", **fields, seconds=seconds)
