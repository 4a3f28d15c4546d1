"""One answer as server-sent events. A quiet stream says so now and then: proxies would end it, and a client that went
away while it waits would not be noticed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from aiohttp import web

from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.shapes import event

QUIET_S = 15.0
COMMENT = b": nothing new\n\n"  # which every reader of events skips


class EventStream:
    """Use it as a context. All of it may raise ConnectionResetError: the client went away."""

    def __init__(self, http: web.Request, headers: dict[str, str], quiet_s: float = QUIET_S) -> None:
        self._http = http
        common = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
        self.response = web.StreamResponse(headers={**common, "X-Accel-Buffering": "no", **headers})
        self._quiet_s = quiet_s
        self._is_quiet = True

    async def __aenter__(self) -> EventStream:
        await self.response.prepare(self._http)
        self._speaker = asyncio.create_task(self._speak())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._speaker.cancel()

    async def write(self, data: bytes) -> None:
        self._is_quiet = False
        await self.response.write(data)

    async def end_with(self, error: ApiError) -> None:
        """The status line is long gone: the error becomes the last event."""
        with suppress(ConnectionResetError):  # nobody is left to tell
            await self.response.write(event(error.body()))

    async def _speak(self) -> None:
        with suppress(ConnectionResetError):  # the handler is cancelled then
            while True:
                self._is_quiet = True
                await asyncio.sleep(self._quiet_s)
                if self._is_quiet:
                    await self.response.write(COMMENT)
