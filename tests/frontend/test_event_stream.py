"""Streams that have nothing to send for a while."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.event_stream import COMMENT, EventStream

DATA = b"data: 1\n\n"


def ask(quiet_s: float, pauses_s: list[float], error: ApiError | None = None) -> bytes:
    """What a client reads of a stream with these pauses between its events."""

    async def handler(http: web.Request) -> web.StreamResponse:
        stream = EventStream(http, {"X-Request-Id": "mine"}, quiet_s)
        async with stream:
            await stream.write(DATA)
            for pause_s in pauses_s:
                await asyncio.sleep(pause_s)
                await stream.write(DATA)
            if error is not None:
                await stream.end_with(error)
        return stream.response

    async def run() -> bytes:
        app = web.Application()
        app.router.add_get("/", handler)
        async with TestServer(app) as server, ClientSession() as client, client.get(server.make_url("/")) as response:
            assert response.content_type == "text/event-stream" and response.headers["X-Request-Id"] == "mine"
            return await response.read()

    return asyncio.run(run())


def test_a_quiet_stream_says_so() -> None:
    said = ask(0.05, [0.4])
    assert said.startswith(DATA) and said.endswith(DATA) and said.count(COMMENT) >= 2
    assert said.replace(COMMENT, b"") == 2 * DATA


def test_a_busy_stream_says_nothing_else() -> None:
    assert ask(30.0, [0.01] * 5) == 6 * DATA


def test_the_last_event_may_be_an_error() -> None:
    assert ask(30.0, [], ApiError("gone", status=500, code="x")).endswith(b'"param":null,"code":"x"}}\n\n')


def test_a_client_that_went_away_ends_the_context() -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def handler(http: web.Request) -> web.StreamResponse:
            stream = EventStream(http, {}, 0.02)
            with pytest.raises(asyncio.CancelledError):
                try:
                    async with stream:
                        await asyncio.sleep(60)
                finally:
                    ended.set()
            return stream.response

        app = web.Application()
        app.router.add_get("/", handler)
        async with TestServer(app, handler_cancellation=True) as server, ClientSession() as client:
            response = await client.get(server.make_url("/"))
            response.close()
            await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(run())
