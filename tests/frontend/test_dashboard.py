"""The dashboard's files as they are served, and the half hour that it draws."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

import pytest

from splash_trt.frontend.dashboard.history import MAX_PHASES, MAX_SWITCHES, WINDOW_S, History
from splash_trt.frontend.dashboard.routes import FOLDER, PATHS
from splash_trt.link import Frames, Status, SwitchReport
from splash_trt.request import TokenDelta
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until, wait_until_ready

KEY = {"Authorization": "Bearer secret"}
SCRIPTS = sorted(FOLDER.glob("*.js"))
PAGE = (FOLDER / "page.html").read_text()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Heard:
    """What a history hands on."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_frames(self, frames: Frames) -> None:
        self.told.append("frames")

    def on_switch(self, report: SwitchReport) -> None:
        self.told.append("switch")

    def on_restart(self) -> None:
        self.told.append("restart")


def frames(layout: str = "tp", switch: str = "steady", *, running: int = 0, tokens: int = 0, output: int = 0) -> Frames:
    target = None if switch == "steady" else "dp"
    status = Status(layout, 0, switch, target, 0.5, "auto", running, 0, (running, 0), (0, 0), (64, 64))
    deltas = (TokenDelta("a", tuple(range(output))),) if output else ()
    return Frames("first", 1, tokens, 0.01, status, deltas)


def report(number: int, *, ended: bool) -> SwitchReport:
    return SwitchReport("first", number, {"number": number, "ended": ended})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> History:
    return History(Heard(), clock)


def test_seconds_without_news_are_like_the_last_one(history: History, clock: Clock) -> None:
    history.on_frames(frames(running=3, tokens=7, output=2))
    history.on_frames(frames(running=5, tokens=1))
    history.on_frames(frames(running=2))
    clock.now += 3.5
    history.on_frames(frames(running=0, tokens=4))
    clock.now += 1
    seen = history.since()
    assert seen.seconds.running == [5, 2, 2, 2] and seen.next == 4 and seen.seconds.first == 0
    assert seen.seconds.tokens == [8, 0, 0, 4] and seen.seconds.output_tokens == [2, 0, 0, 0]
    later = history.since(3)
    assert later.seconds.first == 3 and later.seconds.tokens == [4]
    assert history.since(4).seconds.tokens == [] and history.since(10**9).seconds.tokens == []


def test_phases_are_told_once_and_the_one_before(history: History, clock: Clock) -> None:
    for seconds, message in ((1, frames()), (1, frames()), (3, frames(switch="migrating")), (1, frames("dp"))):
        clock.now += seconds
        history.on_frames(message)
    seen = [(phase.since_s, phase.layout, phase.switch, phase.target) for phase in history.since().phases]
    assert seen == [(0, None, "steady", None), (1, "tp", "steady", None), (5, "tp", "migrating", "dp"),
                    (6, "dp", "steady", None)]  # fmt: skip
    assert [phase.since_s for phase in history.since(6).phases] == [5, 6]
    assert [phase.since_s for phase in history.since(7).phases] == [6]


def test_switches_have_times_and_are_told_when_they_change(history: History, clock: Clock) -> None:
    clock.now += 2
    history.on_switch(report(1, ended=False))
    clock.now += 2
    assert history.since(3).switches == []
    history.on_switch(report(1, ended=True))
    clock.now += 1
    history.on_switch(report(1, ended=True))  # its stall is known now
    (switch,) = history.since(5).switches
    assert (switch.began_s, switch.ended_s) == (2, 4) and switch.record["ended"]
    assert history.since(6).switches == []


def test_another_engine_begins_anew_and_everything_is_handed_on(clock: Clock) -> None:
    heard = Heard()
    history = History(heard, clock)
    history.on_frames(frames(running=4))
    history.on_switch(report(7, ended=True))
    before = history.since()
    clock.now += 1
    history.on_restart()
    clock.now += 2
    seen = history.since()
    assert heard.told == ["frames", "switch", "restart"]
    assert (before.engine, seen.engine) == ("first", None) and seen.server == before.server
    assert seen.switches == [] and seen.seconds.running == [4, 4, 0] and seen.phases[-1].layout is None


def test_memory_is_bounded(history: History, clock: Clock) -> None:
    for number in range(3 * MAX_PHASES):
        clock.now += 0.1
        history.on_frames(frames(("tp", "dp")[number % 2], tokens=1))
        history.on_switch(report(number, ended=True))
    seen = history.since()
    assert len(seen.phases) <= MAX_PHASES and len(seen.switches) == MAX_SWITCHES
    clock.now += 10 * WINDOW_S
    history.on_frames(frames("cp"))
    seen = history.since()
    assert len(seen.seconds.tokens) == WINDOW_S and sum(seen.seconds.tokens) == 0
    # The one before is that in which the window begins.
    assert [phase.layout for phase in seen.phases[-2:]] == ["dp", "cp"] and len(seen.phases) == 2


def test_the_timeline_is_served(server: FrontendProcess, engine: FakeEngine) -> None:
    before = server.ask("GET", "/v1/timeline").json
    assert server.ask("POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 12}).status == 200

    def told() -> int:
        return sum(server.ask("GET", f"/v1/timeline?after={before['next']}").json["seconds"]["output_tokens"])

    wait_until(lambda: told() >= 12)
    after = server.ask("GET", "/v1/timeline").json
    assert after["server"] == before["server"] and after["engine"] == "first" and after["window_s"] == WINDOW_S
    assert after["phases"][-1]["layout"] == engine.layout
    for bad in ("-1", "x", "", "1&after=2", "9" * 13, "%D9%A1"):
        refused = server.ask("GET", f"/v1/timeline?after={bad}")
        assert (refused.status, refused.json["error"]["param"]) == (400, "after"), bad


@pytest.fixture(scope="module")
def locked() -> Iterator[FrontendProcess]:
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        engine = FakeEngine(f"ipc://{folder}/link", ready_message(400))
        engine.start()
        frontend = start_frontend(f"ipc://{folder}/link", "--api-key", "secret", "--keep-engine")
        yield wait_until_ready(frontend)
        frontend.end()
        engine.stop()


@pytest.mark.parametrize("path", PATHS)
def test_files_need_no_key_and_allow_nothing_from_elsewhere(locked: FrontendProcess, path: str) -> None:
    answer = locked.ask("GET", path)
    assert answer.status == 200 and answer.data == (FOLDER / PATHS[path]).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"] == f"{kinds[PATHS[path].rpartition('.')[2]]}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}


def test_what_is_shown_needs_the_key(locked: FrontendProcess) -> None:
    for path in ("/v1/timeline", "/v1/layout?explain=1", "/v1/models"):
        assert locked.ask("GET", path).status == 401
        assert locked.ask("GET", path, **KEY).status == 200
    assert locked.ask("POST", "/v1/layout", {"layout": "dp"}).status == 401
    assert locked.ask("POST", "/v1/layout", {"layout": "dp"}, **KEY).status == 200


def test_the_page_asks_for_its_own_files_alone() -> None:
    named = set(re.findall(r'(?:href|src)="([^"#]+)"', PAGE))
    assert {f"/{name}" for name in named} == PATHS.keys() - {"/dashboard"} - {
        f"/dashboard/{script.name}" for script in SCRIPTS if script.name != "page.js"
    }
    imported = {name for script in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    assert imported | {"page.js"} == {script.name for script in SCRIPTS}
    for path in FOLDER.iterdir():
        elsewhere = set(re.findall(r"https?://[^\"\s]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not elsewhere, (path.name, elsewhere)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src)", PAGE), "the policy forbids inline code"


def test_scripts_name_what_the_page_has() -> None:
    ids = re.findall(r'\bid="([^"]+)"', PAGE)
    assert len(ids) == len(set(ids))
    for script in SCRIPTS:
        used = set(re.findall(r'(?:\$|onPress)\("([^"]+)"', script.read_text()))
        assert used <= set(ids), (script.name, used - set(ids))
    pointed = " ".join(re.findall(r'(?:aria-labelledby|aria-describedby|for)="([^"]+)"', PAGE)).split()
    assert set(pointed) <= set(ids)


def test_no_text_is_read_as_html() -> None:
    for script in SCRIPTS:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script.read_text())
