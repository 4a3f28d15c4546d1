"""HTTP connections that still answer a client that has closed its sending side, as `nc -N` does; listening sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.refusals import refusal, refusal_of_aiohttp

log = logging.getLogger(__name__)

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S = (0.02, 0.1, 0.5)
LATER_PROBE_S = 2.0
BACKLOG = 1024


class HalfOpenHandler(RequestHandler):
    """aiohttp's own handler closes the connection when the client closes its sending side, and the answer is lost.

    A client that has only closed its sending side and one that has gone send the same packet. The difference shows only
    when something is written to it: the host of a program that is gone rejects it. So until the answer begins, the
    client is sent interim responses, which every client of HTTP/1.1 must skip (RFC 9110, 15.2).
    """

    __slots__ = ("_last_body",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_body: StreamReader | None = None
        """The body of the request that came last."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._last_body = self._messages[-1][1]

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its sending side. Returns True to keep the connection open."""
        is_idle = self._waiter is not None and not self._waiter.done()
        if is_idle or self._last_body is None or not self._last_body.is_eof():
            return False
        self.close()  # takes effect when the answers to all requests that came are sent
        self._probe(0)
        return True

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The response to what is not a valid HTTP request, in the form of all other errors; it ends the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, so no error can be sent")
        if isinstance(exc, ContentEncodingError):  # an encoding that aiohttp knows, but this Python cannot decode
            status = web.HTTPUnsupportedMediaType.status_code
            message = "Content-Encoding: it is not supported here; gzip and deflate are"
        if status >= 500:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            message = "the server failed; its log says why"
        response = refusal(request, ApiError(" ".join((message or "this is no HTTP request").split()), status=status))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before our own middleware was called
            resp = refusal_of_aiohttp(request, resp)
        return await super().finish_response(request, resp, start_time)

    def _probe(self, count: int) -> None:
        delay_s = PROBE_S[count] if count < len(PROBE_S) else LATER_PROBE_S
        asyncio.get_running_loop().call_later(delay_s, self._send_interim, count)

    def _send_interim(self, count: int) -> None:
        request, transport = self._current_request, self.transport
        if transport is None or transport.is_closing():
            return
        if request is not None:
            if request.writer.output_size or request.version < HttpVersion11:
                return  # the answer has begun, and its own bytes will show; or the client could not skip these
            transport.write(INTERIM)
        self._probe(count + 1)


async def listen(
    runner: web.AppRunner, host: str | None = None, port: int = 0, *, opened: socket.socket | None = None
) -> asyncio.Server:
    """Serves the runner's application at host and port, or at `opened`, a listening socket. Raises OSError if it cannot
    listen."""
    loop, manager = asyncio.get_running_loop(), runner.server
    assert manager is not None, "the runner is set up"

    def connection() -> HalfOpenHandler:
        return HalfOpenHandler(manager, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: no log

    if opened is not None:
        return await loop.create_server(connection, sock=opened, backlog=BACKLOG)
    return await loop.create_server(connection, host, port, backlog=BACKLOG)


def open_sockets(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """`count` groups of listening sockets, each of one for every address of the host. Raises ValueError if it cannot
    listen there.

    The groups share the port (SO_REUSEPORT): the kernel distributes connections among them by a hash of the client's
    address and port. If all processes accepted from one socket, the first to wake up would take all of a burst. And a
    connection in a group's queue waits there until it is accepted, even while the group's process is restarted.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        groups: list[list[socket.socket]] = [[] for _ in range(count)]
        for family, kind, protocol, _, address in dict.fromkeys(found):
            where = (address[0], port, *address[2:])
            # Bound without sharing first: otherwise another server that shares ports could share this one.
            with _bound(family, kind, protocol, where, shares=False) as probe:
                where = (address[0], probe.getsockname()[1], *address[2:])
            for group in groups:
                opened = _bound(family, kind, protocol, where, shares=count > 1)
                opened.listen(BACKLOG)
                group.append(opened)
            port = where[1]
        return groups
    except (OSError, UnicodeError) as error:
        raise cannot_listen(host, port, error) from None


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...], *, shares: bool) -> socket.socket:
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has sockets of its own
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def check_port(host: str, port: int) -> None:
    """Raises ValueError if host and port cannot be listened at now."""
    for opened in open_sockets(host, port, 1)[0]:
        opened.close()


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ValueError:
    """Names the host if it is no name or address of this machine, and else the port."""
    why = getattr(error, "strerror", None) or error
    # asyncio gives no number where the host has no address here.
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    if number in (None, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ValueError(
            f"host: cannot listen on {host}:{port}: {why}; choose a --host that is a name or an address of this "
            "machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        )
    return ValueError(f"port: cannot listen on {host}:{port}: {why}; choose another --port")
