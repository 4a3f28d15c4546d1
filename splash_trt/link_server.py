"""Rank 0's end of the link: one Unix socket that any number of frontends connect to."""

from __future__ import annotations

import logging

import zmq

from splash_trt import link
from splash_trt.link import FromEngine, ToEngine

log = logging.getLogger(__name__)

MAX_AT_ONCE = 1000  # messages taken in before the next step
MAX_QUEUED = 100_000  # messages a frontend may fall behind by before its frames are dropped


class LinkServer:
    """address: "ipc:///path/of/socket". A client's first message is empty: it says hello and gets a Ready.

    Never blocks but in `poll`. Bytes that are no message are logged and ignored; frames for a client that went away
    vanish, and those for one that does not read are dropped with a warning.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        # Else a full queue would drop without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms: the last frames may still be on their way at the end
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[tuple[bytes, ToEngine | None]]:
        """(client, message) of all that has come, waiting at most timeout_s for the first; None: a hello."""
        if not self._poller.poll(round(timeout_s * 1000)):
            return []
        messages: list[tuple[bytes, ToEngine | None]] = []
        while len(messages) < MAX_AT_ONCE:
            try:
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            if parts == [b""]:
                messages.append((client, None))
                continue
            try:
                messages.append((client, link.decode_to_engine(parts[-1] if parts else b"")))
            except ValueError as error:
                log.warning("ignored what a frontend sent: %s", error)
        return messages

    def send(self, client: bytes, message: FromEngine) -> bool:
        """False if the client has gone away, or does not read: what it misses it could not make up for."""
        try:
            self._socket.send_multipart([client, link.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a frontend does not read; its requests are dropped")
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()
