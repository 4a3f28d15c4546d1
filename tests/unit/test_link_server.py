"""Rank 0's socket: a hello is answered, bytes that are not a message do no harm, clients come and go."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator

import pytest
import zmq

from splash_trt import link
from splash_trt.link import Cancel, Frames, LayoutReply, Shutdown, Status, ToEngine
from splash_trt.link_server import LinkServer
from splash_trt.request import TokenDelta

GARBAGE = [
    b"nonsense",
    b"\xc1",
    b"\x80",
    b"\x81\xa4type\xa6Cancel",
    b"\x82\xa4type\xa6Cancel\xaarequest_id\xa1\xff",
    b"\x91" * 5000,
    b"\x82\xa4type\xa6Cancel\xa3foo" + b"\x91" * 100_000,  # nested deeper than the decoder goes
    link.encode(LayoutReply("first", 1)),  # the wrong way round
]


@pytest.fixture
def address() -> Iterator[str]:
    # Not below tmp_path, which can be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        yield f"ipc://{folder}/link"


@pytest.fixture
def server(address: str) -> Iterator[LinkServer]:
    server = LinkServer(address)
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def connected(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVTIMEO, 5000)
    client.connect(address)
    return client


def receive(server: LinkServer, count: int) -> list[tuple[bytes, ToEngine | None]]:
    messages: list[tuple[bytes, ToEngine | None]] = []
    end = time.monotonic() + 5
    while len(messages) < count and time.monotonic() < end:
        messages += server.poll(0.1)
    return messages


def test_hello_and_messages_in_order(
    server: LinkServer, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    client = connected(context, address)
    client.send(b"")
    sent = [Cancel("a"), Shutdown(drain=True), Cancel("b")]
    for message in sent:
        client.send(link.encode(message))
    received = receive(server, 4)
    assert [message for _, message in received] == [None, *sent]
    assert len({name for name, _ in received}) == 1


def test_clients_are_told_apart(server: LinkServer, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    clients = [connected(context, address) for _ in range(3)]
    for number, client in enumerate(clients):
        client.send(link.encode(Cancel(str(number))))
    received = receive(server, 3)
    for name, message in received:
        assert isinstance(message, Cancel)
        server.send(name, LayoutReply("first", int(message.request_id)))
    for number, client in enumerate(clients):
        assert link.decode_from_engine(client.recv()) == LayoutReply("first", number)


def test_garbage_is_ignored(
    server: LinkServer,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = connected(context, address)
    with caplog.at_level(logging.WARNING):
        for data in GARBAGE:
            client.send(data)
        client.send_multipart([b"", b""])
        client.send_multipart([b"one", b"two", b"\xc1"])
        client.send(link.encode(Cancel("after")))
        assert [message for _, message in receive(server, 1)] == [Cancel("after")]
    assert len(caplog.records) == len(GARBAGE) + 2


def test_poll_waits_no_longer_than_told(server: LinkServer) -> None:
    began = time.monotonic()
    assert server.poll(0) == [] and server.poll(0.1) == []
    assert 0.09 < time.monotonic() - began < 5


def test_frames_for_a_client_that_is_gone_vanish(
    server: LinkServer, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    gone, here = connected(context, address), connected(context, address)
    gone.send(b"")
    [(gone_name, _)] = receive(server, 1)
    here.send(b"")
    [(here_name, _)] = receive(server, 1)
    gone.close(linger=0)
    time.sleep(0.2)
    server.send(gone_name, LayoutReply("first", 1))
    server.send(b"who?", LayoutReply("first", 2))
    server.send(here_name, LayoutReply("first", 3))
    assert link.decode_from_engine(here.recv()) == LayoutReply("first", 3)


def test_a_client_that_does_not_read_blocks_nobody(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("splash_trt.link_server.MAX_QUEUED", 4)
    server = LinkServer(address)
    lazy = context.socket(zmq.DEALER)
    lazy.setsockopt(zmq.RCVHWM, 1)
    lazy.connect(address)
    lazy.send(b"")
    [(name, _)] = receive(server, 1)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        status = Status("tp", 0, "steady", None, 1.0, "auto", 1, 0, (1,), (0,), (64,))
        for step in range(200):
            delta = TokenDelta("a", (step,) * 10_000)
            server.send(name, Frames("first", step, 1, 0.1, status, (delta,)))
    assert time.monotonic() - began < 10
    assert any("does not read" in record.message for record in caplog.records)
    lazy.close(linger=0)
    server.close()


def test_the_last_message_arrives_though_the_server_closes(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    server = LinkServer(address)
    client = connected(context, address)
    client.send(b"")
    [(name, _)] = receive(server, 1)
    server.send(name, LayoutReply("first", 9))
    server.close()
    assert link.decode_from_engine(client.recv()) == LayoutReply("first", 9)


def test_a_client_survives_the_server(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    first = LinkServer(address)
    client = connected(context, address)
    client.send(b"")
    assert receive(first, 1)
    first.close()
    second = LinkServer(address)
    client.send(b"")
    assert [message for _, message in receive(second, 1)] == [None]
    second.close()
