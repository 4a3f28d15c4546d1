"""`splash-trt top`: what it prints of a server, and what it says where there is none."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from splash_trt.frontend.dashboard.history import Phase, Seconds, Switch, Timeline
from splash_trt.frontend.operator_routes import LayoutAnswer
from splash_trt.link import Status
from splash_trt.top.client import Client, NotReached, Snapshot
from splash_trt.top.command import top_command
from splash_trt.top.view import Style, view
from splash_trt.top.words import count, duration, percent, short, signed, size
from tests.frontend.fake_engine import FakeEngine
from tests.frontend.servers import ROOT, FrontendProcess

CANDIDATES: list[dict[str, Any]] = [
    {
        "layout": layout, "moves_owners": False, "fits": layout != "cp", "room_tokens": 26_000, "gain_s": gain,
        "phases": [{"seconds": 1.0, "p99_step_s": 0.0124, "concurrency": 3.0}],
        "switch": {"route": route, "bytes": 4_325_376.0, "steps": len(route), "seconds": 1.5, "cost_s": 0.03},
    }
    for layout, gain, route in (("tp", 0.0, []), ("dp", 0.25, ["dp"]), ("cp", None, ["cp"]))
]  # fmt: skip
RECORD = {
    "number": 1, "source": "dp", "target": "tp", "why": "fewer requests", "ended": True, "outcome": "committed",
    "bytes_between_ranks": {"weights": 0, "pages": 2_000_000, "new_rows": 500_000}, "bytes_inside_ranks": 0,
    "seconds_in": {"armed": 0.4, "retiring": 0.1}, "slowdown": 0.12, "stall_s": 0.002,
}  # fmt: skip
UNDER_WAY = RECORD | {"number": 2, "source": "tp", "target": "dp", "ended": False, "outcome": "under way"}


def snapshot(*, mode: str = "auto", switch: str = "migrating") -> Snapshot:
    target = None if switch == "steady" else "dp"
    status = Status("tp", 1, switch, target, 0.4, mode, 5, 2, (5, 0), (3_200, 3_200), (12_800, 12_800))
    explain = {"mode": mode, "why": "more requests", "policy": {"verdict": "go", "candidates": CANDIDATES}}
    layout = LayoutAnswer("tp", mode, status, ("tp", "dp", "cp"), 2, {}, explain)
    seconds = Seconds(0, [0] * 30 + [5] * 30, [2] * 60, [10] * 60, [0] * 30 + [8] * 30)
    phases = [Phase(0.0, None, "steady", None), Phase(5.0, "dp", "steady", None), Phase(40.0, "tp", switch, target)]
    switches = [Switch(38.0, 40.0, RECORD), Switch(58.0, None, UNDER_WAY)]
    return Snapshot("tiny", layout, Timeline("s", "e", 60.5, 1800, 60, seconds, phases, switches))


def printed(shown: Snapshot, *, plain: bool = False, width: int = 120) -> list[str]:
    file = StringIO()
    Console(file=file, width=width, no_color=True).print(view(shown, Style(plain=plain), width, 60))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def find(lines: list[str], begin: str) -> str:
    return next(line for line in lines if line.startswith(begin))


def test_everything_is_there() -> None:
    lines = printed(snapshot())
    assert lines[0] == "Splash-TRT  tiny"
    now = "layout TP (auto)   running 5   queued 2   tokens/s 10 (8 output)   cache held 25 %"
    assert lines[1] == now
    assert find(lines, "layout  ") == "layout" + " " * 17 + "DP" + "─" * 33 + "TP" + "~" * 18
    assert find(lines, "running") == "running".ljust(18) + " " * 30 + "█" * 30 + " 5"
    assert (
        find(lines, "switch  ")
        == "switch    TP → DP  migrating  ████████░░░░░░░░░░░░ 40 % of the rows moved; about 1.0 MB of 2.5 MB"
    )
    assert find(lines, "0     ").split()[2:] == ["25", "%", "3,200", "9,600", "12,800", "5"]
    assert find(lines, "why") == "why       go" and "          the switch under way: more requests" in lines
    assert find(lines, "TP stay").split()[2:5] == ["0", "s", "12"]
    assert "+0.25 s" in find(lines, "DP ") and "4.3 MB" in find(lines, "DP ") and "no room" in find(lines, "CP ")
    ended = find(lines, "22 s ago")
    for part in ("DP → TP", "committed", "0.5 s", "2.5 MB", "12 %", "2.0 ms", "fewer requests"):
        assert part in ended
    assert lines.index(find(lines, "2 s ago")) < lines.index(ended), "the newest is first"


def test_pinned_and_steady() -> None:
    lines = printed(snapshot(mode="pinned", switch="steady"))
    assert find(lines, "why") == "why       TP is pinned; the load does not change it"
    assert find(lines, "switch  ") == "switch    none under way"


def test_plain_is_ascii_and_narrow_fits() -> None:
    assert "\n".join(printed(snapshot(), plain=True)).isascii()
    for width in (60, 80):
        assert all(len(line) <= width for line in printed(snapshot(), width=width))


def test_words() -> None:
    assert [count(v) for v in (None, 0, 3, 3.26, 1234.5)] == ["-", "0", "3", "3.3", "1,234"]
    assert [short(v) for v in (12, 1234, 123456, 2e9)] == ["12", "1.2 k", "123 k", "2.0 G"]
    assert [size(v) for v in (None, 999, 4_325_376)] == ["-", "999 B", "4.3 MB"]
    assert [duration(v) for v in (0, 0.0021, 0.021, 0.5, 12.345, 345.6)] == [
        "0 s",
        "2.1 ms",
        "21 ms",
        "0.5 s",
        "12.3 s",
        "346 s",
    ]
    assert [signed(v) for v in (0.5, -0.5, 0)] == ["+0.5 s", "-0.5 s", "0 s"]
    assert [percent(v) for v in (None, 0, 0.004, 0.5, -0.2)] == ["-", "0 %", "0.4 %", "50 %", "-20 %"]


def test_once_prints_a_server(server: FrontendProcess, engine: FakeEngine) -> None:
    done = CliRunner().invoke(top_command, ["--once", "--url", server.url])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Splash-TRT  echo" and lines[1].startswith(f"layout {engine.layout.upper()} (auto)   running ")
    assert sum(line.startswith(("0  ", "1  ")) for line in lines) == 2
    assert all(line == line.rstrip() for line in lines) and "\x1b" not in done.output
    silent = CliRunner().invoke(top_command, ["--once", "--url", server.url.removeprefix("http://"), "--minutes", "30"])
    assert silent.exit_code == 0


def test_as_a_command_where_nobody_listens() -> None:
    command = [sys.executable, "-m", "splash_trt", "top", "--once", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no server answers at http://127.0.0.1:9" in done.stderr and "splash-trt serve" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("flags", "words"), [
    (("--url", "ftp://x"), "--url: 'ftp://x' is not allowed"),
    (("--url", "http://x:port"), "--url"),
    (("--url", " "), "--url: ' ' is not allowed"),
    (("--url", "http://[::1"), "--url: 'http://[::1' is not allowed"),
    (("--url", f"http://{'é' * 70}"), "is not allowed"),
    (("--api-key", "a b"), "--api-key: a key is not allowed"),
    (("--api-key-file", "/nowhere"), "--api-key-file"),
])  # fmt: skip
def test_wrong_flags(flags: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(top_command, ["--once", *flags])
    assert done.exit_code == 1 and words in done.output


class Other(BaseHTTPRequestHandler):
    """A server of something else."""

    def do_GET(self) -> None:
        is_refused = self.headers.get("Authorization") != "Bearer right"
        self.send_response(401 if is_refused else 200)
        self.end_headers()
        self.wfile.write(
            b'{"error": {"message": "no", "type": "a", "param": null, "code": null}}' if is_refused else b"hi"
        )

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_wrong_key_and_wrong_server() -> None:
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}/"
        done = CliRunner().invoke(top_command, ["--once", "--url", url, "--api-key", "wrong"])
        assert done.exit_code == 1 and "give it with --api-key" in done.output
        with pytest.raises(NotReached, match="no Splash-TRT server"):
            Client(url, "right").snapshot(0)
        other.shutdown()
