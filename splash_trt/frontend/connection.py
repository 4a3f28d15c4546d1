"""Connections whose client has ended its sending side, as `nc -N` does: they get their answer all the same."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.web_protocol import RequestHandler

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S = (0.02, 0.1, 0.5)
LATER_PROBE_S = 2.0
BACKLOG = 1024


class HalfOpenHandler(RequestHandler):
    """aiohttp's own closes the connection where the client's side ends, and the answer is lost.

    Whether a client only ended its side or went away cannot be told from what it sends: both are the same packet. Only
    writing to it shows, as a machine whose program is gone refuses what comes. So until the answer begins it is sent
    interim responses, which every client of HTTP/1.1 must skip (RFC 9110, 15.2).
    """

    __slots__ = ("_last_body",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_body: StreamReader | None = None
        """Of the request that came last."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._last_body = self._messages[-1][1]

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open."""
        is_idle = self._waiter is not None and not self._waiter.done()
        if is_idle or self._last_body is None or not self._last_body.is_eof():
            return False
        self.close()  # once the answers to what came are sent
        self._probe(0)
        return True

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


async def listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    """Serves the runner's application there. OSError if nothing can listen."""
    loop, manager = asyncio.get_running_loop(), runner.server
    assert manager is not None, "the runner is set up"

    def connection() -> HalfOpenHandler:
        return HalfOpenHandler(manager, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: no log

    return await loop.create_server(connection, host, port, backlog=BACKLOG)
