"""The model's end of the frontend's socket: one thread owns it, and every answer is sent from that thread."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from .protocol import (
    VERSION,
    Cancel,
    Event,
    Failure,
    Frames,
    FromFrontend,
    Generate,
    Hello,
    ToFrontend,
    decode_from_frontend,
    encode,
)

LOOK_S = 0.1
"""How often to look for cancelled requests; asking Triton about one costs 15 µs."""
LATE_S = 1.0  # how long after a deadline to wait for the frontend's own error
HEARTBEAT_MS = 5000
SILENT_MS = 15000  # after so long without a heartbeat the frontend is taken to be gone
MAX_AT_ONCE = 256  # messages that are read before their events are passed on
CANCELLED = 499
"""The HTTP status (nginx's) for a client that went away."""


class Client(Protocol):
    """Gets the events of one request. Its methods are called only by the connection's thread, and not after `deliver`
    has returned True."""

    def deliver(self, events: list[Event]) -> bool:
        """Takes events; returns whether the last one was among them."""

    def fail(self, failure: Failure) -> None: ...

    def is_cancelled(self) -> bool: ...


class Refused(Exception):
    """The request was not taken."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Connection(threading.Thread):
    """Connects in the background, and again whenever the frontend comes back.

    endpoint: ipc:///path or tcp://host:port. max_requests: those under way at once; more are refused.
    """

    def __init__(self, endpoint: str, max_requests: int, log: Callable[[str], None]) -> None:
        super().__init__(name="splash connection", daemon=True)
        self._endpoint = endpoint
        self._max_requests = max_requests
        self._log = log
        self._lock = threading.Lock()
        self._num_requests = 0
        self._new: queue.SimpleQueue[tuple[Generate, Client]] = queue.SimpleQueue()
        self._clients: dict[str, Client] = {}
        self._deadlines: dict[str, float] = {}
        self._unsent: list[Cancel] = []  # the queue to the frontend had no room for them
        self._incarnation: str | None = None  # the frontend's; None: there was no Welcome on this connection yet
        self._why = f"nothing has answered at {endpoint} yet"
        self._closing = False
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)

    def submit(self, request: Generate, client: Client) -> None:
        """May be called by any thread. Raises Refused if the frontend is away or too many requests are under way. Ids
        must be new."""
        with self._lock:
            why = None
            if self._closing:
                why = "the model is being unloaded"
            elif self._incarnation is None:
                why = f"no connection to the Splash-TRT frontend: {self._why}"
            elif self._num_requests >= self._max_requests:
                why = f"overloaded: {self._num_requests} requests are under way, and max_requests is that many"
            if why is not None:
                raise Refused(Failure(503, why))
            self._num_requests += 1
            self._new.put((request, client))
        self._wake()

    def close(self) -> None:
        """Ends all requests under way with an error; returns when that is sent."""
        with self._lock:
            self._closing = True
        self._wake()
        self.join()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: it is about to wake up anyway
            self._waker.send(b"x")

    def run(self) -> None:
        context = zmq.Context()
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.SNDHWM, 2 * self._max_requests)  # a Generate and a Cancel for each request
        link.setsockopt(zmq.RCVHWM, MAX_AT_ONCE)  # the frontend keeps what we do not read
        link.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a frontend that is not there
        link.setsockopt(zmq.LINGER, 500)
        link.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        link.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        link.setsockopt(zmq.RECONNECT_IVL, 100)
        link.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        link.connect(self._endpoint)
        try:
            self._serve(link, monitor)
        finally:
            self._end()
            link.disable_monitor()
            monitor.close(linger=0)
            link.close()
            context.term()
            self._waker.close()
            self._wakes.close()

    def _serve(self, link: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for source in (link, monitor, self._wakes):
            poller.register(source, zmq.POLLIN)
        next_look = time.monotonic()
        while not self._closing:
            wait_s = max(0.0, next_look - time.monotonic()) if self._clients or self._unsent else None
            poller.poll(None if wait_s is None else round(wait_s * 1000))
            with suppress(BlockingIOError):
                while self._wakes.recv(1024):
                    pass
            self._send_new(link)
            self._receive(link)
            self._follow(link, monitor)
            if time.monotonic() >= next_look:
                self._look(link)
                next_look = time.monotonic() + LOOK_S
        for request_id in self._clients:
            self._cancel(link, Cancel(request_id))

    def _end(self) -> None:
        with self._lock:
            self._closing = True  # already so, unless this thread failed
        while not self._new.empty():
            request, client = self._new.get()
            self._clients[request.id] = client
        self._fail_all("the model is being unloaded")

    def _send_new(self, link: zmq.Socket[bytes]) -> None:
        while not self._new.empty():
            request, client = self._new.get()
            self._clients[request.id] = client
            if request.deadline_s is not None:
                self._deadlines[request.id] = time.monotonic() + request.deadline_s + LATE_S
            if self._incarnation is None:
                self._fail(request.id, Failure(503, f"no connection to the Splash-TRT frontend: {self._why}"))
            elif not self._send(link, request):
                self._fail(request.id, Failure(503, "overloaded: the Splash-TRT frontend does not take requests"))

    def _send(self, link: zmq.Socket[bytes], message: ToFrontend) -> bool:
        try:
            link.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _cancel(self, link: zmq.Socket[bytes], cancel: Cancel) -> None:
        if not self._send(link, cancel):
            self._unsent.append(cancel)

    def _receive(self, link: zmq.Socket[bytes]) -> None:
        """Reads messages. Events of one request are passed on together, which costs Triton no more than one event."""
        events: dict[str, list[Event]] = {}
        for _ in range(MAX_AT_ONCE):
            try:
                data = link.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                break
            try:
                message = decode_from_frontend(data)
            except ValueError as error:
                self._log(f"ignored what the frontend sent: {error}")
                continue
            for event in self._take(message):
                events.setdefault(event.id, []).append(event)
        for request_id, of_request in events.items():
            client = self._clients.get(request_id)
            if client is None:
                continue  # cancelled a moment ago
            failure = of_request[-1].failure
            if failure is not None:
                self._fail(request_id, failure)
            elif client.deliver(of_request):
                self._drop(request_id)

    def _take(self, message: FromFrontend) -> tuple[Event, ...]:
        if isinstance(message, Frames):
            # Frames of a frontend that has ended can still be in the queue when the next one has answered.
            return message.events if message.incarnation == self._incarnation else ()
        if message.version != VERSION:
            self._why = f"it speaks version {message.version} of the protocol and this model version {VERSION}"
            self._log(f"{self._endpoint}: {self._why}; write the model repository again")
            return ()
        if message.incarnation != self._incarnation:
            self._fail_all("the Splash-TRT frontend was started anew; send the request again")
            self._incarnation = message.incarnation
            self._log(f"connected to {self._endpoint}, which serves {message.model}")
        return ()

    def _follow(self, link: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Says hello on every new connection, and notices when one ends."""
        while monitor.poll(0):
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send(link, Hello())
                continue
            self._incarnation = None
            self._why = f"the one at {self._endpoint} went away"
            self._log(f"lost the connection to {self._endpoint}")
            self._unsent.clear()
            self._fail_all("the Splash-TRT frontend went away; send the request again")

    def _look(self, link: zmq.Socket[bytes]) -> None:
        """Ends requests that were cancelled, and those whose deadline the frontend has missed."""
        now = time.monotonic()
        unsent, self._unsent = self._unsent, []
        for cancel in unsent:
            self._cancel(link, cancel)
        for request_id, client in list(self._clients.items()):
            if client.is_cancelled():
                failure = Failure(CANCELLED, "the request was cancelled")
            elif now > self._deadlines.get(request_id, now):
                failure = Failure(504, "timeout: the Splash-TRT frontend has not answered in time")
            else:
                continue
            self._cancel(link, Cancel(request_id))
            self._fail(request_id, failure)

    def _fail_all(self, why: str) -> None:
        for request_id in list(self._clients):
            self._fail(request_id, Failure(503, why))

    def _fail(self, request_id: str, failure: Failure) -> None:
        client = self._clients[request_id]
        self._drop(request_id)
        client.fail(failure)

    def _drop(self, request_id: str) -> None:
        del self._clients[request_id]
        self._deadlines.pop(request_id, None)
        with self._lock:
            self._num_requests -= 1
