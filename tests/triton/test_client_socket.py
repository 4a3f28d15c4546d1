"""The frontend's socket for local clients, spoken to as its messages allow and otherwise."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from splash_trt.frontend import client_socket
from splash_trt.frontend.client_socket import Completions, check_free
from splash_trt.triton_backend.repository import protocol
from splash_trt.triton_backend.repository.protocol import Cancel, Event, Frames, Generate, Hello, Welcome
from tests.e2e.servers import wait_until
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import ROOT, FrontendProcess, start_frontend, wait_until_ready


class LocalClient:
    def __init__(self, endpoint: str, receive_queue: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, receive_queue)
        self._socket.connect(endpoint)

    def send(self, message: protocol.ToFrontend | bytes) -> None:
        self._socket.send(message if isinstance(message, bytes) else protocol.encode(message))

    def generate(self, name: str, prompt: str, max_tokens: int, stream: bool = True, **body: Any) -> None:
        fields = {"prompt": prompt, "max_tokens": max_tokens, **body}
        self.send(Generate(name, json.dumps(fields).encode(), stream))

    def receive(self) -> Welcome | Frames:
        assert self._socket.poll(30_000), "nothing came"
        return protocol.decode_from_frontend(self._socket.recv())

    def events(self, until: Callable[[list[Event]], bool]) -> list[Event]:
        """All that come until there are enough."""
        events: list[Event] = []
        while not until(events):
            message = self.receive()
            events += message.events if isinstance(message, Frames) else ()
        return events

    def answer(self) -> list[Event]:
        """Of the one request under way."""
        return self.events(lambda events: bool(events) and bool(events[-1].finish or events[-1].failure))

    def silent(self) -> bool:
        return not self._socket.poll(200)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Served:
    def __init__(self, folder: Path, tokenizer_folder: Path) -> None:
        link = f"ipc://{folder}/socket-link"
        self.endpoint = f"ipc://{folder}/socket-clients"
        self.engine = FakeEngine(link, ready_message(400), step_s=0.001)
        self.engine.start()
        flags = ("--tokenizer", str(tokenizer_folder), "--client-endpoint", self.endpoint, "--max-queued", "3")
        self.frontend: FrontendProcess = wait_until_ready(start_frontend(link, "--max-body-bytes", "20000", *flags))

    def close(self) -> None:
        self.frontend.end()
        self.engine.stop()


@pytest.fixture(scope="module")
def served(socket_folder: Path, tokenizer_folder: Path) -> Iterator[Served]:
    served = Served(socket_folder, tokenizer_folder)
    yield served
    served.close()


@pytest.fixture
def client(served: Served) -> Iterator[LocalClient]:
    client = LocalClient(served.endpoint)
    yield client
    client.close()


def try_to_serve(link: str, endpoint: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "splash_trt.frontend.main", "--engine", link, "--model-name", "echo"]
    command += ["--port", "0", "--client-endpoint", endpoint, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("what", ["file", "folder", "no folder", "server", "port"])
def test_a_place_that_is_taken_is_left_alone(served: Served, socket_folder: Path, what: str) -> None:
    """ZeroMQ would remove what is there."""
    path = socket_folder / what.replace(" ", "-") / ("x" if what == "no folder" else "")
    endpoint = served.endpoint if what == "server" else f"ipc://{path}"
    if what == "file":
        path.write_text("precious")
    if what == "folder":
        path.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if what == "port":
            endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        refused = try_to_serve(f"ipc://{socket_folder}/no-engine", endpoint)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.splitlines()[-1].startswith(f"frontend: client_endpoint: cannot listen on {endpoint}: ")
    assert "Traceback" not in refused.stderr
    assert what != "file" or path.read_text() == "precious"
    client = LocalClient(served.endpoint)
    client.send(Hello())
    assert isinstance(client.receive(), Welcome)
    client.close()


def test_a_socket_that_a_killed_server_left_is_replaced(socket_folder: Path) -> None:
    path = socket_folder / "left"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    check_free(f"ipc://{path}")


def test_a_port_that_is_taken_is_what_is_said(served: Served, socket_folder: Path) -> None:
    """Not that local clients, who would have come next, cannot be parted with."""
    flags = ("--port", str(served.frontend.port))
    refused = try_to_serve(f"ipc://{socket_folder}/no-engine", f"ipc://{socket_folder}/free", *flags)
    assert refused.returncode == 2 and "frontend: port: cannot listen" in refused.stderr.splitlines()[-1]


def test_a_welcome(client: LocalClient) -> None:
    client.send(Hello())
    welcome = client.receive()
    assert isinstance(welcome, Welcome) and welcome.model == "echo" and welcome.version == protocol.VERSION


def test_an_answer_in_pieces_and_whole(client: LocalClient) -> None:
    client.generate("a", "abc", 40)
    events = client.answer()
    assert len(events) > 1 and "".join(event.text for event in events) == ("abc" * 14)[:40]
    assert sum(event.num_tokens for event in events) == 40 and events[-1].finish == "length"
    client.generate("a", "abc", 7, stream=False, logprobs=1)  # the id is free again
    [event] = client.answer()
    assert (event.text, event.num_tokens, event.num_prompt_tokens, len(event.logprobs)) == ("abcabca", 7, 3, 7)
    assert event.logprobs[0].name == "a" and event.logprobs[0].top[0][1:] == ("a", -0.5)


def test_stop_strings_are_found_here(client: LocalClient, served: Served) -> None:
    client.generate("a", "abcdef", 4000, stop="ef")
    events = client.answer()
    assert "".join(event.text for event in events) == "abcd" and events[-1].finish == "stop"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b'{"prompt": "a", "temperature": -1}', 400, "temperature"),
        (b'{"prompt": ["a", "b"]}', 400, "prompt"),
        (b'{"prompt": "a", "n": 2}', 400, "n"),
        (b'{"prompt": "a", "model": "other"}', 404, "model"),
        (b'{"prompt": "' + b"a" * 20000 + b'"}', 413, None),
    ],
)
def test_refusals(client: LocalClient, body: bytes, status: int, param: str | None) -> None:
    client.send(Generate("a", body))
    [event] = client.answer()
    assert event.failure is not None and (event.failure.status, event.failure.param) == (status, param)


def test_what_is_no_message_is_ignored(client: LocalClient) -> None:
    for junk in (b"", b"\xc1", b"\x91" * 5000, protocol.encode(Welcome("x", "y"))):
        client.send(junk)
    client.send(Cancel("unknown"))
    client.generate("a", "abc", 3)
    assert "".join(event.text for event in client.answer()) == "abc"


def test_cancelling(client: LocalClient, served: Served) -> None:
    before = len(served.engine.submitted)
    client.generate("a", "abc", 4000, ignore_eos=True)
    client.events(lambda events: bool(events))
    client.send(Cancel("a"))
    [request] = served.engine.submitted[before:]
    wait_until(lambda: request.id in served.engine.cancelled)
    while not client.silent():
        message = client.receive()  # or a welcome, when another client has gone away
        assert isinstance(message, Welcome) or all(event.finish is None for event in message.events)


def test_a_deadline(client: LocalClient, served: Served) -> None:
    before = len(served.engine.submitted)
    client.send(Generate("a", b'{"prompt": "abc", "max_tokens": 4000, "ignore_eos": true}', True, 0.2))
    failure = client.answer()[-1].failure
    assert failure is not None and failure.status == 504 and failure.message == "timeout: not complete within 0.2 s"
    [request] = served.engine.submitted[before:]
    wait_until(lambda: request.id in served.engine.cancelled)


def test_the_queue_s_bound_holds_here_too(client: LocalClient, served: Served) -> None:
    served.engine.paused.set()
    try:
        for number in range(4):
            client.generate(str(number), "abc", 3)
        [event] = client.events(lambda events: bool(events))
        assert event.id == "3" and event.failure is not None and event.failure.status == 429
        assert served.frontend.ask("POST", "/v1/completions", {"prompt": "a"}).status == 429
    finally:
        served.engine.paused.clear()
    events = client.events(lambda events: sum(event.finish is not None for event in events) == 3)
    assert {event.id for event in events} == {"0", "1", "2"}


@pytest.mark.parametrize("attempt", range(20))  # ZeroMQ says that a client is gone before sending to it fails: a race
def test_a_client_that_goes_away_is_cancelled(served: Served, attempt: int) -> None:
    client = LocalClient(served.endpoint)
    before = len(served.engine.submitted)
    # Nothing is sent to it before the end, so that only the connection's end tells.
    client.generate("a", "abc", 4000, stream=False, ignore_eos=True)
    wait_until(lambda: len(served.engine.submitted) > before)
    client.close()
    [request] = served.engine.submitted[before:]
    wait_until(lambda: request.id in served.engine.cancelled)


def test_clients_that_go_away_do_not_wait_for_each_other(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_socket, "GONE_AFTER_S", (*client_socket.GONE_AFTER_S, 3600.0))
    endpoint, completions = f"ipc://{socket_folder}/gone", cast(Completions, None)  # no request is sent

    async def one_after_the_other() -> None:
        serves = client_socket.ClientSocket(endpoint, completions, "echo", 1000)
        serves.start()
        for _ in range(3):
            client = LocalClient(endpoint)
            client.send(Hello())
            while not serves._clients:
                await asyncio.sleep(0.01)
            client.close()
            while serves._clients:
                await asyncio.sleep(0.01)
        await serves.close()

    asyncio.run(asyncio.wait_for(one_after_the_other(), 30))


def _connects(passing: socket.socket, endpoint: str) -> bool:
    try:
        passing.connect(endpoint.removeprefix("ipc://"))
    except BlockingIOError:
        return False
    return True


def test_thousands_that_come_and_go_leave_it_to_others(served: Served) -> None:
    """ZeroMQ's thread waited for somebody to read who has gone, a second each."""
    for _ in range(3000):
        with socket.socket(socket.AF_UNIX) as passing:
            passing.setblocking(False)  # so that a full queue of those who come is an error, and waits for nobody
            wait_until(partial(_connects, passing, served.endpoint))
    client = LocalClient(served.endpoint)
    client.generate("a", "abc", 3)
    assert "".join(event.text for event in client.answer()) == "abc"
    client.close()


def test_two_clients_may_use_the_same_id(client: LocalClient, served: Served) -> None:
    other = LocalClient(served.endpoint)
    client.generate("a", "abc", 30)
    other.generate("a", "xyz", 30)
    assert "".join(event.text for event in client.answer()) == "abc" * 10
    assert "".join(event.text for event in other.answer()) == "xyz" * 10
    other.close()


def test_a_client_that_reads_late_gets_everything_in_fewer_pieces(served: Served) -> None:
    slow, quick = LocalClient(served.endpoint, receive_queue=1), LocalClient(served.endpoint)
    slow.generate("a", "abc", 1500, ignore_eos=True, logprobs=20)
    quick.generate("b", "abc", 1500, ignore_eos=True)
    num_pieces = len(quick.answer())
    events = slow.answer()
    assert "".join(event.text for event in events) == "abc" * 500
    assert sum(len(event.logprobs) for event in events) == 1500
    assert len(events) < num_pieces
    slow.close()
    quick.close()
