"""The frontend's process: `python -m splash_trt.frontend.main --engine ipc:///path …`.

It ends when a signal asks for it, when the engine ends, or when the process that holds the lifeline's other end does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from splash_trt.frontend.app import Frontend
from splash_trt.frontend.background import BackgroundThreads
from splash_trt.frontend.client_socket import ClientSocket
from splash_trt.frontend.connection import cannot_listen, listen
from splash_trt.frontend.dashboard.history import History
from splash_trt.frontend.engine_client import EngineClient
from splash_trt.frontend.errors import engine_ended, unavailable
from splash_trt.frontend.grammars import Grammars
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.options import Options, parse
from splash_trt.frontend.reading import choose_reasoning_parser, choose_tool_parser
from splash_trt.frontend.sampling import Defaults
from splash_trt.frontend.serving import Limits, Serving
from splash_trt.frontend.shared_metrics import PUBLISH_S
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.lifeline import remove_sockets
from splash_trt.observe import log as logs
from splash_trt.observe.spans import Spans

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
LAST_WORDS_S = 1.0  # in which handlers tell their clients how it ended
LIFELINE_GRACE_S = 0.8
ENGINE_FOUND_S = 2.0
ENDING = b"e"  # sent over the lifeline when a signal asks for the end


class Ending:
    """Why and how the process ends: set once, waited for by `run`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.signals = 0
        self.why = ""
        self.code = 0
        self.told: Callable[[], None] = lambda: None
        """Called once, when `why` and `code` are set."""

    def ask(self, why: str, code: int) -> None:
        if not self._event.is_set():
            self.why, self.code = why, code
            self._event.set()
            self.told()

    def on_signal(self, name: str) -> None:
        self.signals += 1
        self.ask(name, 0)

    async def wait(self) -> None:
        await self._event.wait()


async def run(options: Options) -> int:
    """Serves until something ends it, or it is cancelled; returns the exit code, 0 only after SIGTERM or SIGINT.

    Must run in the main thread, which handles signals. Raises ValueError for an option that cannot be used.
    """
    spans = Spans()
    if options.otlp_endpoint is not None:
        from splash_trt.observe.otel import open_spans

        spans = open_spans(options.otlp_endpoint, options.model_name)
    member = options.member
    metrics = Metrics(options.model_name, spans, member)
    history = History(metrics) if member is None else History(metrics, began_s=member.began_s, server=member.run)
    engine = EngineClient(options.engine, history)
    metrics.watch(lambda: engine.status, lambda: engine.ready)
    serving = serving_of(options, engine, metrics)
    frontend = Frontend(serving, history, api_key=options.key(), key_for_metrics=options.api_key_for_metrics)
    clients = None
    if options.client_endpoint is not None and (member is None or member.number == 0):
        clients = ClientSocket(options.client_endpoint, frontend, options.model_name, options.max_body_bytes)
    ending = Ending()
    loop = asyncio.get_running_loop()
    if options.lifeline is not None:
        _watch_lifeline(options, options.lifeline, loop, ending)
    # handler_cancellation: when a client goes away its handler is cancelled, which cancels its requests.
    application = frontend.application()
    application.middlewares[:0] = spans.middlewares
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S)
    # It would log a traceback for each client that does not speak HTTP; our handlers log their own failures.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    await runner.setup()
    engine.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal, number.name)
    tasks: list[asyncio.Task[None]] = []
    servers: list[asyncio.Server] = []
    try:
        servers += await _listen(runner, options, engine)
        if clients is not None:
            clients.start()
        tasks.append(asyncio.create_task(_announce(engine, servers, options)))
        if member is not None:
            tasks.append(asyncio.create_task(_publish(serving)))
        return await _serve(options, frontend, clients, engine, ending)
    finally:
        for task in tasks:
            task.cancel()
        for server in servers:
            server.close()
        await runner.cleanup()
        if clients is not None:
            await clients.close()
        await engine.close()
        spans.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def serving_of(options: Options, engine: EngineClient, metrics: Metrics) -> Serving:
    """What the routes share, as the options say. Raises ValueError for a tokenizer's folder that cannot be used."""
    tokenizer = None if options.tokenizer is None else Tokenizer(Path(options.tokenizer))
    background = BackgroundThreads()
    knows = (lambda text: False) if tokenizer is None else tokenizer.knows
    return Serving(
        engine=engine,
        metrics=metrics,
        tokenizer=tokenizer,
        grammars=None if tokenizer is None else Grammars(tokenizer.source, background),
        model_name=options.model_name,
        limits=Limits(
            max_queued=options.max_queued,
            max_body_bytes=options.max_body_bytes,
            ready_deadline_s=options.ready_deadline_s,
        ),
        defaults=load_defaults(options),
        tool_parser=choose_tool_parser(options.tool_parser, knows),
        reasoning_parser=choose_reasoning_parser(options.reasoning_parser, knows),
        background=background,
    )


def load_defaults(options: Options) -> Defaults:
    """The defaults of sampling parameters. Raises ValueError for a generation_config.json that cannot be used."""
    if options.tokenizer is None or options.generation_config == "none":
        return Defaults()
    return Defaults.load(Path(options.tokenizer) / "generation_config.json")


async def _listen(runner: web.AppRunner, options: Options, engine: EngineClient) -> list[asyncio.Server]:
    member = options.member
    if member is not None:
        if member.again:  # connections are queued already: better to let them wait for the engine than refuse them
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(engine.found.wait(), ENGINE_FOUND_S)
        servers = [await listen(runner, opened=socket.socket(fileno=number)) for number in member.sockets]
    else:
        try:
            servers = [await listen(runner, options.host, options.port)]
        except OSError as error:
            raise cannot_listen(options.host, options.port, error) from None
    log.info("port %d is open; waiting for the engine", servers[0].sockets[0].getsockname()[1])
    return servers


async def _announce(engine: EngineClient, servers: list[asyncio.Server], options: Options) -> None:
    await engine.found.wait()
    gc.collect()
    gc.freeze()  # what is loaded stays for good: collections that scan it would hold up all streams
    log.info("listening on http://%s:%d for %s", *servers[0].sockets[0].getsockname()[:2], options.model_name)


async def _publish(serving: Serving) -> None:
    """Publishes this frontend's metrics every PUBLISH_S, for the other frontends to include."""
    while True:
        await serving.background.run(serving.metrics.publish)
        await asyncio.sleep(PUBLISH_S)


async def _serve(
    options: Options,
    frontend: Frontend,
    clients: ClientSocket | None,
    engine: EngineClient,
    ending: Ending,
) -> int:
    """Waits for the end, and for requests to finish; returns the exit code.

    The port stays open until the end, so that late clients get a 503 instead of no connection.
    """
    asked, lost = asyncio.create_task(ending.wait()), asyncio.create_task(engine.lost.wait())
    links = [*engine.tasks, *(clients.tasks if clients is not None else ())]
    waits = [asked, lost, *links]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        lost.cancel()
    frontend.drain()

    def busy() -> bool:
        return frontend.busy or (clients is not None and clients.busy)

    if engine.lost.is_set():
        log.error("the engine ended")
        await _until_idle(busy, ending, LAST_WORDS_S)
        return EXIT_FAILED
    for task in links:
        if task.done():
            log.error("a link to the engine or to local clients failed", exc_info=task.exception())
            return EXIT_FAILED
    log.info("ending: %s", ending.why)
    if ending.code == 0:
        await _until_idle(busy, ending, options.shutdown_deadline_s, engine)
    engine.fail_all(unavailable("the server is shutting down", "shutting_down") if ending.code == 0 else engine_ended())
    await _until_idle(busy, ending, LAST_WORDS_S)
    if options.end_engine:
        engine.shut_down_engine()
    return ending.code


async def _until_idle(
    busy: Callable[[], bool], ending: Ending, deadline_s: float, engine: EngineClient | None = None
) -> None:
    """Waits for the generations under way, for deadline_s at most; a second signal, or the engine's end, cuts it short.
    """
    end = time.monotonic() + deadline_s
    while busy() and time.monotonic() < end and ending.signals < 2:
        if engine is not None and engine.lost.is_set():
            return
        await asyncio.sleep(0.02)


def _watch_lifeline(options: Options, fd: int, loop: asyncio.AbstractEventLoop, ending: Ending) -> None:
    """Ends the process when the lifeline's other end closes. That is noticed by a thread, even if the event loop is
    busy. What comes over a two-way lifeline is sent back by the event loop, to show that the loop is alive."""
    try:
        both_ways = stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError as error:
        raise ValueError(f"lifeline: {fd} is not an open file descriptor: {error.strerror}") from None

    def say(data: bytes) -> None:
        with suppress(OSError):  # the other end has closed, which the thread notices
            os.write(fd, data)

    def wait() -> None:
        with suppress(OSError, RuntimeError):
            while data := os.read(fd, 1024):
                if both_ways:
                    loop.call_soon_threadsafe(say, data)
        with suppress(RuntimeError):  # the loop may have ended by itself
            loop.call_soon_threadsafe(ending.ask, "the lifeline ended", EXIT_FAILED)
        time.sleep(LIFELINE_GRACE_S)
        _remove_sockets(options)
        os._exit(EXIT_FAILED)

    if both_ways:
        ending.told = lambda: say(ENDING)
    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _remove_sockets(options: Options) -> None:
    """Removes what the process at the lifeline's other end would have removed if it had not been killed."""
    if options.own_socket and options.lifeline is not None and _has_ended(options.lifeline):
        remove_sockets(Path(options.engine.removeprefix("ipc://")).parent)


def _has_ended(lifeline: int) -> bool:
    with socket.socket(fileno=os.dup(lifeline)) as line, suppress(OSError):  # BlockingIOError: it is alive
        return not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        name = "frontend" if options.member is None else options.member.name
        logs.configure(name, level=options.log_level, form=options.log_format)
        try:
            return asyncio.run(run(options))
        finally:
            _remove_sockets(options)
    except ValueError as error:
        print(f"frontend: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
