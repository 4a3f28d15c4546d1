"""Several frontends on one port: their metrics add up, and the others go on when one dies or hangs.

Which of two takes a connection cannot be chosen. With as many connections as here, each takes some, except once in a
million runs.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from splash_trt.frontend.connection import check_port
from splash_trt.frontend.options import Options
from splash_trt.frontends import EXIT_FRONTEND, Frontends
from splash_trt.link import SwitchReport
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import Answer, FrontendProcess, wait_until

MANY = 20
BEAT_S = 0.3
MODEL = Path(__file__).resolve().parents[2] / "models" / "splash-tiny"
BODY = {"prompt": [7, 8, 9], "ignore_eos": True, "return_token_ids": True}
Start = Callable[..., "Deployment"]


class Stream(threading.Thread):
    """Reads a completion until it ends or breaks."""

    def __init__(self, connection: http.client.HTTPConnection, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self._body = {**BODY, "stream": True, "max_tokens": num_tokens}
        self.begun = threading.Event()
        self.data = b""
        self.start()

    def run(self) -> None:
        with suppress(OSError, http.client.HTTPException):
            self._connection.request("POST", "/v1/completions", json.dumps(self._body))
            for line in self._connection.getresponse():
                self.data += line
                self.begun.set()
        self._connection.close()

    @property
    def done(self) -> bool:
        return self.data.endswith(b"data: [DONE]\n\n")


class Deployment:
    """Two frontends and their engine. failures: what `failed` was told."""

    def __init__(self, *, restarts: bool = True, step_s: float = 0.005, **options: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="splash-")
        address = f"ipc://{self._folder.name}/link"
        self.engine = FakeEngine(address, ready_message(400), step_s=step_s)
        self.engine.start()
        self.failures: list[tuple[int, str]] = []
        self.frontends = Frontends(
            Options(engine=address, model_name="echo", port=0, **options),  # type: ignore[arg-type]
            2,
            Path(self._folder.name),
            restarts=restarts,
            failed=lambda code, why: self.failures.append((code, why)),
            beat_s=BEAT_S,
        )
        self.wait_until_ready()

    def client(self) -> FrontendProcess:
        return FrontendProcess(None, self.frontends.port)  # type: ignore[arg-type]

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        return self.client().ask(method, path, body, **headers)

    def ask_all(self, method: str, path: str, body: object = None, **headers: str) -> list[Answer]:
        return [self.ask(method, path, body, **headers) for _ in range(MANY)]

    def wait_until_ready(self) -> None:
        wait_until(lambda: {answer.status for answer in self.ask_all("GET", "/readyz")} == {200}, 60)

    def counted(self, name: str) -> list[float]:
        """The sum over all labels, as many answers say it."""
        pattern = re.compile(rf"^{name}(?:{{.*}})? (\S+)$", re.MULTILINE)
        texts = [answer.data.decode() for answer in self.ask_all("GET", "/metrics")]
        return [sum(map(float, pattern.findall(text))) for text in texts]

    def streams(self, num_tokens: int = 4000) -> list[Stream]:
        streams = [Stream(self.client().connect(), num_tokens) for _ in range(MANY)]
        for stream in streams:
            assert stream.begun.wait(30)
        return streams

    def close(self) -> None:
        self.frontends.close()
        self.engine.stop()
        self._folder.cleanup()


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Deployment] = []

    def start(**options: object) -> Deployment:
        started.append(Deployment(**options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for deployment in started:
        deployment.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    """One for all tests that leave two frontends running, be they others than before."""
    deployment = Deployment()
    yield deployment
    deployment.close()


def test_each_answers_for_all(server: Deployment) -> None:
    names = ("splash_output_tokens_total", "splash_tokens_total", "vllm:generation_tokens_total")
    before = {name: server.counted(name)[-1] for name in names}
    for _ in range(MANY):
        assert server.ask("POST", "/v1/completions", {**BODY, "max_tokens": 5}).status == 200
    # What the engine computed is told to both, and counts once.
    for name in names:
        wait_until(lambda name=name: set(server.counted(name)) == {before[name] + 5 * MANY})  # type: ignore[misc]
    seen = server.counted("splash_http_responses_total")
    assert seen == sorted(seen) and seen[-1] > MANY, "a total fell"
    text = server.ask("GET", "/metrics").data.decode()
    assert len(re.findall(r'^process_cpu_seconds_total{frontend="[01]"}', text, re.MULTILINE)) == 2
    assert len(re.findall("^# TYPE process_cpu_seconds_total ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_one_takes_its_own_streams_along_and_nothing_that_was_counted(
    server: Deployment, number: int
) -> None:
    names = ("splash_output_tokens_total", "splash_tokens_total", "splash_http_responses_total")
    before = {name: server.counted(name)[-1] for name in names}
    streams = server.streams(num_tokens=500)  # 2.5 s of steps
    victim = server.frontends.processes()[number]
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        stream.join(60)
    assert {stream.done for stream in streams} == {True, False}
    wait_until(lambda: victim not in server.frontends.processes() and len(server.frontends.processes()) == 2)
    server.wait_until_ready()
    for name in names:
        seen = server.counted(name)
        assert seen == sorted(seen) and seen[0] >= before[name], name
    assert server.ask("POST", "/v1/completions", {**BODY, "max_tokens": 5}).status == 200
    assert not server.failures and server.frontends.code is None


def test_one_that_stands_is_killed_and_started_again(server: Deployment, capfd: pytest.CaptureFixture[str]) -> None:
    victim = server.frontends.processes()[0]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: victim not in server.frontends.processes(), 30)
    wait_until(lambda: len(server.frontends.processes()) == 2)
    server.wait_until_ready()
    said = capfd.readouterr().err
    assert "frontend 0 has given no sign of life for 1.5 s; it is killed" in said
    assert "frontend 0 was ended by SIGKILL" in said and "frontend 0 is started again" in said
    assert "frontend 1 " not in said, said


def test_files_that_are_missing_for_a_while_do_not_end_the_others(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine that is built anew in its folder is not there when a frontend is started again."""
    tokenizer = shutil.copytree(MODEL, tmp_path / "tokenizer")
    server = start(tokenizer=str(tokenizer))
    tokenizer.rename(tmp_path / "elsewhere")
    os.kill(server.frontends.processes()[0], signal.SIGKILL)
    said = ""

    def failed_again() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "frontend 0 ended with exit code 2" in said

    wait_until(lambda: failed_again() or server.failures, 60)
    assert not server.failures and server.frontends.code is None
    (tmp_path / "elsewhere").rename(tokenizer)
    wait_until(lambda: len(server.frontends.processes()) == 2, 60)
    server.wait_until_ready()
    assert server.ask("POST", "/v1/completions", {**BODY, "max_tokens": 5}).status == 200


def test_without_restarts_a_death_ends_all(start: Start) -> None:
    server = start(restarts=False)
    os.kill(server.frontends.processes()[1], signal.SIGKILL)
    wait_until(lambda: server.failures)
    assert server.failures == [(EXIT_FRONTEND, "frontend 1 was ended by SIGKILL")]
    assert server.frontends.code == EXIT_FRONTEND


@pytest.mark.parametrize("to_all", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_a_signal_lets_all_finish_and_end(start: Start, to_all: bool) -> None:
    server = start(shutdown_deadline_s=30.0)
    streams = server.streams(num_tokens=200)
    if to_all:
        server.frontends.end()
    else:
        os.kill(server.frontends.processes()[1], signal.SIGTERM)
    wait_until(lambda: server.frontends.code is not None, 40)
    assert server.frontends.code == 0 and not server.failures
    for stream in streams:
        stream.join(10)
    assert all(stream.done for stream in streams)
    assert not server.engine.shut_down.is_set(), "that is for who started the frontends to do, once all have ended"


def test_an_end_while_they_are_loaded_is_in_order(tmp_path: Path) -> None:
    failures: list[str] = []
    options = Options(engine=f"ipc://{tmp_path}/link", model_name="echo", port=0)
    frontends = Frontends(options, 2, tmp_path, restarts=True, failed=lambda code, why: failures.append(why))
    frontends.end()
    try:
        wait_until(lambda: frontends.code is not None, 60)
        assert frontends.code == 0 and failures == []
    finally:
        frontends.close()


def test_operators_see_one_server(start: Start) -> None:
    server = start(api_key="secret")
    key = {"Authorization": "Bearer secret"}
    assert {answer.status for answer in server.ask_all("GET", "/v1/layout")} == {401}
    assert server.ask("POST", "/v1/layout", {"layout": "cp", "pin": True}, **key).status == 200

    def layouts() -> set[tuple[str, str]]:
        answers = [answer.json for answer in server.ask_all("GET", "/v1/layout", **key)]
        return {(answer["layout"], answer["mode"]) for answer in answers}

    wait_until(lambda: layouts() == {("cp", "pinned")})

    record: dict[str, object] = {"number": 1, "source": "tp", "target": "cp", "outcome": "done", "ended": "done"}
    server.engine.send(SwitchReport("first", 1, record))
    wait_until(lambda: all(answer.json["data"] for answer in server.ask_all("GET", "/v1/switches", **key)))
    wait_until(lambda: set(server.counted("splash_switches_total")) == {1.0})

    timelines = [answer.json for answer in server.ask_all("GET", "/v1/timeline", **key)]
    assert len({timeline["server"] for timeline in timelines}) == 1
    assert [timeline["now_s"] for timeline in timelines] == sorted(timeline["now_s"] for timeline in timelines)
    assert len({timeline["next"] for timeline in timelines}) <= 3, "their seconds begin together"


def test_another_engine_is_noticed_by_all(start: Start) -> None:
    server = start()
    streams = server.streams()
    server.engine.send(ready_message(400, incarnation="second"))
    for stream in streams:
        stream.join(30)
        assert b"engine_restarted" in stream.data
    server.wait_until_ready()
    wait_until(lambda: set(server.counted("splash_engine_restarts_total")) == {1.0})


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 64 + ".invalid"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(ValueError, match=rf"^host: cannot listen on {host}:0: .* choose a --host"):
        check_port(host, 0)


def test_a_port_in_use_is_refused_although_frontends_share_theirs(server: Deployment, tmp_path: Path) -> None:
    for count in (1, 2):
        options = Options(engine=f"ipc://{tmp_path}/l", model_name="echo", port=server.frontends.port)
        with pytest.raises(ValueError, match="port: cannot listen on 127.0.0.1"):
            Frontends(options, count, tmp_path, restarts=False, failed=lambda code, why: None)
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        options = Options(engine=f"ipc://{tmp_path}/l", model_name="echo", port=taken.getsockname()[1])
        with pytest.raises(ValueError, match="port: cannot listen"):
            Frontends(options, 2, tmp_path, restarts=False, failed=lambda code, why: None)
