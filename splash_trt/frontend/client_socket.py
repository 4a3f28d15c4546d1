"""Completions for local programs over a ZeroMQ socket, made for Triton's model.

A request is the body of POST /v1/completions with one prompt, and is treated like an HTTP request: with the same
checks, limits, tokenizer and stop strings. The messages are in triton_backend/repository/protocol.py.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.generation import Generation
from splash_trt.frontend.stream import ShownLogprob
from splash_trt.triton_backend.repository import protocol
from splash_trt.triton_backend.repository.protocol import Cancel, Event, Failure, Frames, Generate, Token, Welcome

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
FRAMES_QUEUED = 16  # messages queued for one client; what comes after them is kept here, joined for each request
SLOW_CLIENT_S = 0.02
GONE_AFTER_S = (0.0, 0.02, 1.0)  # waits before each message to all clients, to find the one that has gone (_watch)
LINGER_MS = 500
SPARE_BYTES = 1 << 16  # of a message, in addition to the body


class Completions(Protocol):
    """What the socket needs of the frontend."""

    def completion(self, body: bytes, request_id: str) -> Awaitable[Completion]:
        """As Frontend.completion."""

    def token_name(self, token: int) -> str: ...


@dataclass(frozen=True)
class Completion:
    """One prompt, checked and tokenized, not yet submitted. Whoever gets it has to call `generation.close`."""

    generation: Generation
    num_prompt_tokens: int


@dataclass(eq=False)
class Job:
    """One request of a client. `ended`: nothing will be added to its answer any more."""

    client: bytes
    request: Generate
    task: asyncio.Task[None] | None = None
    completion: Completion | None = None
    failure: Failure | None = None
    ended: bool = False


@dataclass
class Client:
    """A client: its requests by their ids, and those of them that have news to send."""

    jobs: dict[str, Job] = field(default_factory=dict)
    news: dict[str, Job] = field(default_factory=dict)
    unsent: bytes | None = None
    """A message for which its queue had no room."""


def check_endpoint(endpoint: str, field: str = "client_endpoint") -> None:
    """Raises ValueError unless `endpoint` is a Unix socket or a port of this machine: clients need no key there."""
    kind, _, where = endpoint.partition("://")
    host, _, port = where.rpartition(":")
    if kind == "ipc" and where.startswith("/"):
        if len(os.fsencode(where)) > zmq.IPC_PATH_MAX_LEN or "\0" in where:
            most = zmq.IPC_PATH_MAX_LEN
            raise ValueError(f"{field}: {where!r} is not allowed; a socket's path has at most {most} bytes")
        return
    if kind != "tcp" or host not in LOOPBACK or not port.isdecimal() or not 0 < int(port) < 65536:
        allowed = "ipc:///path/of/socket or tcp://127.0.0.1:PORT"
        raise ValueError(f"{field}: {endpoint!r} is not allowed; it must be {allowed}")


def check_free(endpoint: str) -> None:
    """Raises ValueError if nothing can listen at `endpoint` now: there is no such folder, another server listens there,
    or a file is in its place (ZeroMQ would replace either).

    A socket that nobody listens at was left by a killed server, and may be replaced.
    """
    kind, _, where = endpoint.partition("://")
    if kind != "ipc":
        return
    path = Path(where)
    if not os.path.isdir(path.parent):
        raise ValueError(f"client_endpoint: cannot listen on {endpoint}: there is no folder {path.parent}")
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(where)
    except FileNotFoundError:
        return
    except OSError as error:
        if path.is_socket() and error.errno == errno.ECONNREFUSED:
            return
        why = error.strerror if path.is_socket() else "a file is there"
    else:
        why = "another server does"
    raise ValueError(f"client_endpoint: cannot listen on {endpoint}: {why}; choose another path")


class ClientSocket:
    """Serves any number of clients. One that reads slowly gets longer pieces, less often. When one goes away, its
    requests are cancelled."""

    def __init__(self, endpoint: str, completions: Completions, model_name: str, max_body_bytes: int) -> None:
        check_endpoint(endpoint)
        self._endpoint = endpoint
        self._completions = completions
        self._welcome = Welcome(uuid.uuid4().hex, model_name)
        self._max_body_bytes = max_body_bytes
        self._clients: dict[bytes, Client] = {}
        self._news = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        """They end only by `close`, or by an exception, which is a bug."""

    @property
    def busy(self) -> bool:
        """Whether there is a request of which something is still to be sent."""
        return any(client.jobs or client.unsent for client in self._clients.values())

    @property
    def has_news(self) -> bool:
        """Whether something waits to be sent."""
        return any(client.news or client.unsent is not None for client in self._clients.values())

    def start(self) -> None:
        """Begins to listen. Raises ValueError if that is impossible at this endpoint."""
        check_free(self._endpoint)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it, what cannot be sent is dropped silently
        self._socket.setsockopt(zmq.SNDHWM, FRAMES_QUEUED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_body_bytes + SPARE_BYTES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            message = f"client_endpoint: cannot listen on {self._endpoint}: {error.strerror}"
            raise ValueError(message) from None
        log.info("local clients are served at %s", self._endpoint)
        self.tasks = [asyncio.create_task(act) for act in (self._receive(), self._tell(), self._watch())]

    async def close(self) -> None:
        """Cancels requests under way without telling their clients: fail them through the engine's client before."""
        if not self.tasks:
            return  # it was never started, or could not be
        jobs = [job.task for client in self._clients.values() for job in client.jobs.values() if job.task is not None]
        for task in (*self.tasks, *jobs):
            task.cancel()
        await asyncio.gather(*self.tasks, *jobs, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    async def _receive(self) -> None:
        while True:
            name, *parts = await self._socket.recv_multipart()
            try:
                message = protocol.decode_to_frontend(parts[-1] if parts else b"")
            except ValueError as error:
                log.warning("ignored what a local client sent: %s", error)
                continue
            client = self._clients.setdefault(name, Client())
            if isinstance(message, Generate):
                self._begin(name, client, message)
            elif isinstance(message, Cancel):
                job = client.jobs.get(message.id)
                if job is not None:
                    self._forget(client, job)
            else:
                await self._welcome_client(name)
            # A receive that finds a message at once does not yield to other tasks.
            await asyncio.sleep(0)

    def _begin(self, name: bytes, client: Client, request: Generate) -> None:
        if request.id in client.jobs:
            log.warning("ignored a request of a local client under the id of another: %s", request.id)
            return
        job = client.jobs[request.id] = Job(name, request)
        job.task = asyncio.create_task(self._serve(job))

    async def _serve(self, job: Job) -> None:
        """One request, from its body to its answer's end."""
        deadline_s = job.request.deadline_s
        try:
            await asyncio.wait_for(self._generate(job), deadline_s)
        except ApiError as error:
            job.failure = Failure(error.status, error.message, error.param)
        except asyncio.TimeoutError:
            job.failure = Failure(504, f"timeout: not complete within {deadline_s:g} s")
        except Exception:
            log.exception("a local client's request failed")
            job.failure = Failure(500, "the server failed; its log says why")
        job.ended = True
        self._mark(job)

    async def _generate(self, job: Job) -> None:
        if len(job.request.body) > self._max_body_bytes:
            raise ApiError(f"body: at most {self._max_body_bytes} bytes are allowed", status=413)
        completion = await self._completions.completion(job.request.body, uuid.uuid4().hex)
        generation = completion.generation
        try:
            job.completion = completion
            generation.submit()
            async for _ in generation.run():
                if job.request.stream:
                    self._mark(job)
        finally:
            generation.close()

    def _mark(self, job: Job) -> None:
        client = self._clients.get(job.client)
        if client is not None and client.jobs.get(job.request.id) is job:
            client.news[job.request.id] = job
            self._news.set()

    async def _tell(self) -> None:
        """Sends news. All news for a client goes into one message; while its queue is full, more is joined to it."""
        while True:
            await self._news.wait()
            self._news.clear()
            for name, client in list(self._clients.items()):
                if client.unsent is None and client.news:
                    client.unsent = protocol.encode(self._frames(client))
                if client.unsent is not None:
                    await self._send_unsent(name, client)
            if any(client.unsent is not None for client in self._clients.values()):
                await asyncio.sleep(SLOW_CLIENT_S)
            if self.has_news:
                self._news.set()

    def _frames(self, client: Client) -> Frames:
        news, client.news = client.news, {}
        for request_id, job in news.items():
            if job.ended:
                del client.jobs[request_id]
        return Frames(self._welcome.incarnation, tuple(self._event(job) for job in news.values()))

    async def _send_unsent(self, name: bytes, client: Client) -> None:
        assert client.unsent is not None
        try:
            await self._socket.send_multipart([name, client.unsent], zmq.NOBLOCK)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            self._gone(name, error)
        client.unsent = None

    def _event(self, job: Job) -> Event:
        completion, failure = job.completion, job.failure
        if completion is None:
            return Event(job.request.id, failure=failure)
        piece = completion.generation.answers[0].take()
        return Event(
            job.request.id,
            text=piece.text,
            num_tokens=len(piece.tokens),
            logprobs=tuple(self._token(shown) for shown in piece.logprobs),
            num_prompt_tokens=completion.num_prompt_tokens,
            # Only at the end, though it may be known before.
            finish=completion.generation.answers[0].finish if job.ended else None,
            failure=failure,
        )

    def _token(self, shown: ShownLogprob) -> Token:
        known, name = shown.logprob, self._completions.token_name
        top = tuple((token, name(token), logprob) for token, logprob in known.top)
        return Token(known.token, name(known.token), known.logprob, top)

    async def _watch(self) -> None:
        """Finds clients that have gone. ZeroMQ only reports that one has; a message to each shows which: it fails.

        The report comes a moment before sending begins to fail. So messages are sent after each wait of GONE_AFTER_S,
        which begin again when another client goes.
        """
        waits: list[float] = []
        while True:
            if await self._monitor.poll(1e3 * waits[0] if waits else None):
                await recv_monitor_message(self._monitor)
                waits = list(GONE_AFTER_S)
                continue
            del waits[0]
            for name in list(self._clients):
                await self._welcome_client(name)

    async def _welcome_client(self, name: bytes) -> None:
        try:
            await self._socket.send_multipart([name, protocol.encode(self._welcome)], zmq.NOBLOCK)
        except zmq.Again:
            pass  # the client is there, and its queue is full
        except zmq.ZMQError as error:
            self._gone(name, error)

    def _gone(self, name: bytes, error: zmq.ZMQError) -> None:
        """Cancels the requests of a client that cannot be reached. Raises `error` if it says something else."""
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        client = self._clients.pop(name, Client())
        for job in list(client.jobs.values()):
            self._forget(client, job)

    def _forget(self, client: Client, job: Job) -> None:
        del client.jobs[job.request.id]
        client.news.pop(job.request.id, None)
        if job.task is not None:
            job.task.cancel()
