"""Log lines: their two forms, one a switch, and nothing in them that would break a line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import pytest

from splash_trt.observe import log

PROGRAM = """
import logging
from splash_trt.observe import log
log.configure("rank 3", level={level!r}, form={form!r})
logger = logging.getLogger("splash_trt.test")
logger.debug("hidden unless asked for")
logger.info("hello %s", "you\\nand you")
log.event(logger, logging.WARNING, "switch", number=1, why='a "reason"', part=0.12345678, bytes={{"a": 1}}, gone=None)
logging.getLogger("aiohttp.access").debug("a body")
try:
    raise RuntimeError("broken")
except RuntimeError:
    logger.exception("failed")
"""


def lines(level: str, form: str) -> list[str]:
    program = PROGRAM.format(level=level, form=form)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text() -> None:
    first, second, third, *traceback = lines("info", "text")
    assert first == "rank 3: INFO hello you\\nand you"
    assert second == 'rank 3: WARNING switch number=1 why="a \\"reason\\"" part=0.123457 bytes=a:1'
    assert third == "rank 3: ERROR failed" and traceback[-1] == "RuntimeError: broken"


def test_json() -> None:
    debug, hello, switch, failed = [json.loads(line) for line in lines("debug", "json")]
    assert debug["level"] == "debug" and hello["message"] == "hello you\nand you"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", hello.pop("time"))
    assert hello == {
        "level": "info",
        "source": "rank 3",
        "rank": 3,
        "logger": "splash_trt.test",
        "message": "hello you\nand you",
    }
    assert (switch["message"], switch["number"], switch["part"], switch["bytes"]) == ("switch", 1, 0.12345678, {"a": 1})
    assert "gone" not in switch and failed["exception"].endswith("RuntimeError: broken")


@pytest.mark.parametrize(("level", "form", "field"), [("loud", "text", "log_level"), ("info", "xml", "log_format")])
def test_wrong_words_are_refused(level: str, form: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: .* is not one of "):
        log.configure("frontend", level=level, form=form)


def record(number: int, **changed: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "number": number,
        "source": "tp",
        "target": "dp",
        "why": "a crowd",
        "ended": True,
        "outcome": "committed",
        "seconds_in": {"preparing": 0.5, "migrating": 1.0},
        "bytes_between_ranks": {"pages": 7},
        "bytes_inside_ranks": 0,
        "slowdown": None,
        "stall_s": None,
    }
    return {**fields, **changed}


def test_one_line_a_switch_once_all_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    switches = log.SwitchLines(logging.getLogger("splash_trt.test"))

    def numbers() -> list[tuple[int, object]]:
        return [(r.fields["number"], r.fields.get("stall_s")) for r in caplog.records]  # type: ignore[attr-defined]

    switches.told(record(1, ended=False, outcome="under way"))
    switches.told(record(1))
    assert numbers() == []  # its stall may still come
    switches.told(record(1, stall_s=0.25))
    switches.told(record(1, stall_s=0.25))
    assert numbers() == [(1, 0.25)]
    switches.told(record(2, outcome="aborted: no room: rank 1 lacks 3 pages"))
    assert numbers()[1:] == [(2, None)] and caplog.records[1].levelname == "WARNING"
    switches.told(record(3))
    switches.told(record(4))  # the next one ended first
    switches.flush()  # idle
    switches.flush()
    assert numbers()[2:] == [(3, None), (4, None)]
    text = log.TextLines("rank 0").format(caplog.records[0])
    assert text == (
        'rank 0: INFO switch number=1 source=tp target=dp why="a crowd" outcome=committed bytes_between_ranks=pages:7 '
        "bytes_inside_ranks=0 stall_s=0.25 seconds_in=preparing:0.5,migrating:1 seconds=1.5"
    )
