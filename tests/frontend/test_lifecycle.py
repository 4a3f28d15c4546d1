"""Clients, engines and parents that go away; queues that are full; and the orderly end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import ROOT, FrontendProcess, start_frontend, wait_until, wait_until_ready

ENDLESS = {"prompt": [7, 8, 9], "max_tokens": 4000, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def own_engine(address: str) -> Iterator[FakeEngine]:
    engine = FakeEngine(address, ready_message(400), step_s=0.01)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def own_server(own_engine: FakeEngine, address: str) -> Iterator[FrontendProcess]:
    flags = ("--ready-deadline", "0.3", "--max-queued", "3", "--shutdown-deadline", "0.5")
    frontend = start_frontend(address, *flags)
    yield wait_until_ready(frontend)
    frontend.end()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled(server: FrontendProcess, engine: FakeEngine, stream: bool) -> None:
    before = len(engine.submitted)
    connection = server.connect()
    body = {**ENDLESS, "prompt": [[7, 8], [9, 10]], "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        response = connection.getresponse()
        response.readline()
        response.close()
    else:
        wait_until(lambda: len(engine.submitted) == before + 2)
    connection.close()
    names = {request.id for request in engine.submitted[before:]}
    wait_until(lambda: names <= set(engine.cancelled))


def test_a_full_queue(own_server: FrontendProcess, own_engine: FakeEngine) -> None:
    own_engine.paused.set()
    answers: list[int] = []

    def ask() -> None:
        answers.append(own_server.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 1}).status)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(own_engine.submitted) == 3)
    refused = own_server.ask("POST", "/v1/completions", {"prompt": [5], "stream": True})
    assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json["error"]["type"] == "rate_limit_error"
    # They wait and no step completes: alive, and not ready.
    wait_until(lambda: own_server.ask("GET", "/readyz").status == 503)
    assert "no step has completed" in own_server.ask("GET", "/readyz").json["reason"]
    assert own_server.ask("GET", "/healthz").status == 200
    own_engine.paused.clear()
    for thread in threads:
        thread.join()
    assert answers == [200, 200, 200]
    assert own_server.ask("GET", "/readyz").status == 200
    time.sleep(0.5)  # idle for longer than the deadline
    assert own_server.ask("GET", "/readyz").status == 200
    assert own_server.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 1}).status == 200


def test_ready_through_a_long_request(own_server: FrontendProcess) -> None:
    answer: list[int] = []
    body = {"prompt": [5], "max_tokens": 80}  # 0.8 s of steps, against a deadline of 0.3 s
    thread = threading.Thread(target=lambda: answer.append(own_server.ask("POST", "/v1/completions", body).status))
    thread.start()
    while thread.is_alive():
        assert own_server.ask("GET", "/readyz").status == 200
        time.sleep(0.02)
    assert answer == [200]


def test_without_an_engine(address: str) -> None:
    frontend = start_frontend(address)
    try:
        assert frontend.ask("GET", "/healthz").status == 503
        assert "not ready yet" in frontend.ask("GET", "/readyz").json["reason"]
        refused = frontend.ask("POST", "/v1/completions", {"prompt": [5]})
        assert refused.status == 503 and refused.json["error"]["code"] == "engine_not_ready"
        assert frontend.ask("GET", "/v1/layout").status == 503 and frontend.ask("GET", "/metrics").status == 200
        engine = FakeEngine(address, ready_message(400))
        engine.start()  # late
        wait_until_ready(frontend)
        assert frontend.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 2}).status == 200
        frontend.process.send_signal(signal.SIGINT)
        assert frontend.wait_for_exit() == 0
        assert engine.shut_down.wait(5)  # it was told to end too
        engine.stop()
    finally:
        frontend.end()


def test_engine_killed(address: str) -> None:
    command = [sys.executable, "-m", "tests.frontend.fake_engine", "--engine", address, "--step-seconds", "0.01"]
    engine = subprocess.Popen(command, cwd=ROOT)
    frontend = start_frontend(address)
    try:
        wait_until_ready(frontend)
        whole: list[int] = []
        thread = threading.Thread(target=lambda: whole.append(frontend.ask("POST", "/v1/completions", ENDLESS).status))
        thread.start()
        connection = frontend.connect()
        connection.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}))
        response = connection.getresponse()
        assert b"token_ids" in response.readline()
        engine.kill()
        last = [line for line in response.read().split(b"\n\n") if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "engine_ended"
        thread.join()
        assert whole == [500]
        assert frontend.wait_for_exit() == 1
        assert any("the engine ended" in line for line in frontend.log)
    finally:
        engine.kill()
        engine.wait()
        frontend.end()


def test_sigterm_lets_short_requests_finish_and_cancels_long_ones(
    own_server: FrontendProcess, own_engine: FakeEngine
) -> None:
    short = own_server.connect()
    short.request("POST", "/v1/completions", json.dumps({"prompt": [5], "max_tokens": 20}))
    long = own_server.connect()
    long.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}))
    kept = own_server.connect()
    kept.request("GET", "/healthz")
    kept.getresponse().read()
    wait_until(lambda: len(own_engine.submitted) == 2)
    own_server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any("ending" in line for line in own_server.log))
    kept.request("POST", "/v1/completions", json.dumps({"prompt": [5]}))
    refused = kept.getresponse()
    assert refused.status == 503 and b"shutting_down" in refused.read()
    answer = short.getresponse()
    assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 20
    last = [line for line in long.getresponse().read().split(b"\n\n") if line][-1]
    assert json.loads(last[6:])["error"]["code"] == "shutting_down"
    assert own_server.wait_for_exit() == 0
    assert own_engine.shut_down.wait(5)


def test_lifeline(own_engine: FakeEngine, address: str) -> None:
    reading, writing = os.pipe()
    frontend = start_frontend(address, "--lifeline", str(reading), pass_fds=(reading,))
    os.close(reading)
    try:
        wait_until_ready(frontend)
        connection = frontend.connect()
        connection.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}))
        connection.getresponse().readline()
        os.close(writing)
        began = time.monotonic()
        assert frontend.wait_for_exit() == 1
        assert time.monotonic() - began < 10  # a second, and what a crowded machine takes
    finally:
        frontend.end()


def test_port_in_use(server: FrontendProcess, address: str) -> None:
    command = [sys.executable, "-m", "splash_trt.frontend.main", "--engine", address, "--model-name", "echo"]
    command += ["--port", str(server.port)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode == 2 and f"port: cannot listen on 127.0.0.1:{server.port}" in second.stderr
