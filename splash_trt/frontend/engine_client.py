"""The frontend's end of the link to rank 0: sends requests, and hands what comes back to whoever waits for it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from splash_trt import link
from splash_trt.frontend.errors import ApiError, engine_ended, unavailable
from splash_trt.link import (
    Cancel,
    Explain,
    Explanation,
    Frames,
    FromEngine,
    LayoutReply,
    Ready,
    SetLayout,
    Shutdown,
    Status,
    Submit,
    SwitchReport,
    ToEngine,
)
from splash_trt.request import Request, TokenDelta

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107  # bytes; the kernel's limit for a Unix socket
LAST_FRAMES_S = 0.05  # after a disconnect, for reading what the engine sent last
LINGER_MS = 500
RECONNECT_MS = 20  # short, so that all frontends find a new engine at about the same time
MAX_TAKING_S = 0.002  # messages are read for so long before their tokens are passed on: more at once if we lag behind
MAX_FLUSHES = 64  # receivers flushed in a row before the event loop's other tasks have a turn


class Listener(Protocol):
    """Is told of everything that concerns no single request."""

    def on_frames(self, frames: Frames) -> None: ...

    def on_switch(self, report: SwitchReport) -> None: ...

    def on_restart(self) -> None:
        """Another engine than before answers; it counts everything from the start."""


class Receiver(Protocol):
    """Gets what its requests generate. After one or more calls of `put` and `fail` comes one of `flush`."""

    def put(self, index: int, delta: TokenDelta) -> None:
        """index: which of the receiver's requests the delta is for."""

    def fail(self, error: ApiError) -> None:
        """Nothing more will come."""

    def flush(self) -> None: ...


class Route:
    """Where a request's tokens go."""

    __slots__ = ("receiver", "index", "number", "started")

    def __init__(self, receiver: Receiver, index: int, number: int) -> None:
        self.receiver = receiver
        self.index = index
        self.number = number
        self.started = False
        """Its first token has come."""


class EngineClient:
    """Speaks with one engine at a time; messages of an incarnation other than the last Ready's are dropped.

    `found` is set when an engine is ready, `lost` when an engine that was ready is gone. Use it from one event loop,
    between `start` and `close`.
    """

    def __init__(self, address: str, listener: Listener) -> None:
        """address: "ipc:///path/of/socket"; the engine may bind it later."""
        path = address.removeprefix("ipc://")
        if path == address or not path:
            raise ValueError(f"engine: {address!r} is not an address of the form ipc:///path/of/socket")
        if len(path.encode()) > MAX_SOCKET_PATH:
            raise ValueError(f"engine: {path!r} is longer than {MAX_SOCKET_PATH} bytes; use a shorter path")
        self._address = address
        self._listener = listener
        self._routes: dict[str, Route] = {}
        self._ids: dict[int, str] = {}
        """{number: request id}."""
        self._numbers = itertools.count()
        self._fed: dict[Receiver, None] = {}
        """Receivers to `flush`, in the order of their first `put`."""
        self._replies: dict[int, asyncio.Future[LayoutReply | Explanation]] = {}
        self._tokens = itertools.count(1)
        self._num_unstarted = 0
        self._connected = False
        self._busy_since = 0.0
        self._last_frames = 0.0
        self.ready: Ready | None = None
        self.status: Status | None = None
        self.found = asyncio.Event()
        self.lost = asyncio.Event()

    def start(self) -> None:
        """Connects in the background."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the number of requests, which the server bounds
        self._socket.setsockopt(zmq.RCVHWM, 0)  # a frame that is dropped would be tokens that a client never sees
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)
        self.tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        """They end only with `close`, or by an exception, which is a bug."""

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    @property
    def alive(self) -> bool:
        """The engine is there and has said what it serves."""
        return self._connected and self.ready is not None

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token, what was sent a moment ago included, and other frontends' that have
        no cache yet."""
        waiting = 0 if self.status is None else self.status.waiting
        return max(self._num_unstarted, waiting)

    @property
    def num_requests(self) -> int:
        return len(self._routes)

    def silent_s(self) -> float:
        """Seconds since the engine last told of a step while it had work; 0 if it has none."""
        if not self._has_work():
            return 0.0
        return time.monotonic() - max(self._busy_since, self._last_frames)

    def submit(self, request: Request, receiver: Receiver, index: int) -> None:
        """ApiError (503) while there is no engine. The id must be new."""
        if not self.alive:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        assert request.id not in self._routes, request.id
        if not self._has_work():
            self._busy_since = time.monotonic()
        number = next(self._numbers)
        self._routes[request.id] = Route(receiver, index, number)
        self._ids[number] = request.id
        self._num_unstarted += 1
        self._send(Submit(request, number))

    def cancel(self, request_id: str) -> None:
        """No more will come for this request. Does nothing if it has ended."""
        if self._drop(request_id) is not None:
            self._send(Cancel(request_id))

    async def set_layout(self, layout: str, pin: bool) -> LayoutReply:
        """The engine's answer; it comes between two steps."""
        reply = await self._ask(lambda token: SetLayout(token, layout, pin))
        assert isinstance(reply, LayoutReply), reply
        return reply

    async def explain(self) -> Explanation:
        """Why the layout is what it is. The answer comes between two steps."""
        reply = await self._ask(Explain)
        assert isinstance(reply, Explanation), reply
        return reply

    async def _ask(self, question: Callable[[int], ToEngine]) -> LayoutReply | Explanation:
        if not self.alive:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        token = next(self._tokens)
        reply = self._replies[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(token))
            return await reply
        finally:
            del self._replies[token]

    def shut_down_engine(self) -> None:
        self._send(Shutdown(drain=False))

    def fail_all(self, error: ApiError) -> None:
        """Every request that is under way ends with this error."""
        for request_id in list(self._routes):
            route = self._drop(request_id)
            assert route is not None
            route.receiver.fail(error)
            route.receiver.flush()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def _has_work(self) -> bool:
        status = self.status
        return bool(self._routes) or (status is not None and status.running + status.waiting > 0)

    def _send(self, message: ToEngine) -> None:
        self._socket.send(link.encode(message))

    def _drop(self, request_id: str) -> Route | None:
        route = self._routes.pop(request_id, None)
        if route is not None:
            del self._ids[route.number]
            self._num_unstarted -= not route.started
        return route

    async def _receive(self) -> None:
        at_once: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        while True:
            self._decode((await self._socket.recv_multipart())[-1])
            end = time.monotonic() + MAX_TAKING_S
            with suppress(zmq.Again):
                while time.monotonic() < end:
                    self._decode(at_once.recv_multipart(zmq.NOBLOCK)[-1])
            fed, self._fed = self._fed, {}
            for count, receiver in enumerate(fed, 1):
                receiver.flush()
                if count % MAX_FLUSHES == 0:
                    await asyncio.sleep(0)
            # A receive that finds a message at once does not yield: without this, an engine that is ahead of us would
            # keep the tasks that write to clients from running.
            await asyncio.sleep(0)

    def _decode(self, data: bytes) -> None:
        try:
            message = link.decode_from_engine(data)
        except ValueError as error:
            log.warning("ignored what the engine sent: %s", error)
            return
        self._take(message)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._take_ready(message)
        elif self.ready is None or message.incarnation != self.ready.incarnation:
            log.warning("dropped a %s of another engine than the present one", type(message).__name__)
        elif isinstance(message, Frames):
            self._take_frames(message)
        elif isinstance(message, SwitchReport):
            self._listener.on_switch(message)
        else:
            reply = self._replies.get(message.token)
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _take_ready(self, ready: Ready) -> None:
        if self.ready is not None and self.ready.incarnation != ready.incarnation:
            self.fail_all(ApiError("the engine was started anew", status=500, code="engine_restarted"))
            self.status = None
            log.warning("another engine answers; requests of the one before have ended")
            self._listener.on_restart()
        self.ready = ready
        self.found.set()

    def _take_frames(self, frames: Frames) -> None:
        self.status = frames.status
        if frames.num_tokens or frames.deltas:
            self._last_frames = time.monotonic()
        for delta in link.all_deltas(frames, self._ids):
            route = self._routes.get(delta.request_id)
            if route is None:
                continue  # cancelled by us a moment ago
            if not route.started and delta.tokens:
                route.started = True
                self._num_unstarted -= 1
            if delta.finish is not None:
                self._drop(delta.request_id)
            route.receiver.put(route.index, delta)
            self._fed[route.receiver] = None
        self._listener.on_frames(frames)

    async def _watch(self) -> None:
        """Says hello on every new connection, and notices when the engine goes."""
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._socket.send(b"")
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connected = False
                if self.ready is not None:
                    await asyncio.sleep(LAST_FRAMES_S)
                    self.fail_all(engine_ended())
                    self.lost.set()
