"""The frontend's process: `python -m splash_trt.frontend.main --engine ipc:///path …`, or `run` inside a supervisor.

It ends when a signal asks for it, when the engine ends, or when the process that holds the lifeline's other end does.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web

from splash_trt.frontend.app import Frontend
from splash_trt.frontend.client_socket import ClientSocket, check_endpoint
from splash_trt.frontend.engine_client import EngineClient
from splash_trt.frontend.errors import engine_ended, unavailable
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.lifeline import remove_sockets

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
LOG_FORMAT = "frontend: %(levelname)s %(message)s"
LAST_WORDS_S = 1.0  # for handlers to tell their clients how it ended
LIFELINE_GRACE_S = 0.8


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Wrong values raise ValueError naming the field."""

    engine: str
    """Where rank 0 listens: ipc:///path/of/socket."""
    model_name: str
    """As clients name it."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; None: token ids only."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    max_queued: int = 1024
    """Requests that wait for their first token; more are refused with 429."""
    max_body_bytes: int = 16 << 20
    ready_deadline_s: float = 30.0
    """Not ready when there is work and no step completes for so long."""
    shutdown_deadline_s: float = 10.0
    """For requests under way to finish in when a signal comes; then they are cancelled."""
    client_endpoint: str | None = None
    """Where local clients (Triton's model) are served: ipc:///path or tcp://127.0.0.1:PORT; None: nowhere."""
    lifeline: int | None = None
    """File descriptor of a pipe's reading end; this process ends when the pipe does."""
    end_engine: bool = True
    """Tell the engine to end when a signal ends this process."""
    own_socket: bool = False
    """Remove the engine's socket and its folder at the end, as the engine may not live to do it."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not allowed; it must be from 0 to 65535")
        if self.client_endpoint is not None:
            check_endpoint(self.client_endpoint)
        for field in ("max_queued", "max_body_bytes", "ready_deadline_s", "shutdown_deadline_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"{field}: {value} is not allowed; it must be above 0")


class Ending:
    """Why and how the process ends: set once, waited for by `run`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.signals = 0
        self.why = ""
        self.code = 0

    def ask(self, why: str, code: int) -> None:
        if not self._event.is_set():
            self.why, self.code = why, code
            self._event.set()

    def on_signal(self, name: str) -> None:
        self.signals += 1
        self.ask(name, 0)

    async def wait(self) -> None:
        await self._event.wait()


async def run(options: Options) -> int:
    """Serves until something ends it; the exit code, 0 only after SIGTERM or SIGINT. Cancelling it ends it at once.

    Must run in the main thread, which is the one that signals reach. ValueError: an option that cannot be used.
    """
    tokenizer = None if options.tokenizer is None else Tokenizer(Path(options.tokenizer))
    metrics = Metrics(options.model_name)
    engine = EngineClient(options.engine, metrics)
    metrics.watch(lambda: engine.status, lambda: engine.ready)
    frontend = Frontend(
        engine,
        metrics,
        tokenizer,
        model_name=options.model_name,
        max_queued=options.max_queued,
        max_body_bytes=options.max_body_bytes,
        ready_deadline_s=options.ready_deadline_s,
    )
    clients = None
    if options.client_endpoint is not None:
        clients = ClientSocket(options.client_endpoint, frontend, options.model_name, options.max_body_bytes)
    ending = Ending()
    loop = asyncio.get_running_loop()
    if options.lifeline is not None:
        _watch_lifeline(options, options.lifeline, loop, ending)
    # handler_cancellation: a client that goes away takes its handler along, which cancels its requests.
    runner = web.AppRunner(
        frontend.application(), handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S
    )
    # It would log a traceback for each client that speaks no HTTP; what fails in a handler is logged there.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    await runner.setup()
    engine.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal, number.name)
    ready = None
    try:
        await _listen(runner, options)
        if clients is not None:
            clients.start()
        ready = asyncio.create_task(_announce(engine, runner, options))
        return await _serve(options, frontend, clients, engine, runner, ending)
    finally:
        if ready is not None:
            ready.cancel()
        await runner.cleanup()
        if clients is not None:
            await clients.close()
        await engine.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _listen(runner: web.AppRunner, options: Options) -> None:
    try:
        await web.TCPSite(runner, options.host, options.port).start()
    except OSError as error:
        raise _cannot_listen(options, error) from None
    log.info("port %d is open; waiting for the engine", runner.addresses[0][1])


def check_port(options: Options) -> None:
    """ValueError if nothing can listen on host and port now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise _cannot_listen(options, error) from None


def _cannot_listen(options: Options, error: OSError) -> ValueError:
    why = error.strerror or error
    return ValueError(f"port: cannot listen on {options.host}:{options.port}: {why}; choose another --port")


async def _announce(engine: EngineClient, runner: web.AppRunner, options: Options) -> None:
    await engine.found.wait()
    log.info("listening on http://%s:%d for %s", *runner.addresses[0][:2], options.model_name)


async def _serve(
    options: Options,
    frontend: Frontend,
    clients: ClientSocket | None,
    engine: EngineClient,
    runner: web.AppRunner,
    ending: Ending,
) -> int:
    """From the first request to the last; how it ended, as an exit code."""
    asked, lost = asyncio.create_task(ending.wait()), asyncio.create_task(engine.lost.wait())
    links = [*engine.tasks, *(clients.tasks if clients is not None else ())]
    waits = [asked, lost, *links]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        lost.cancel()
    frontend.draining = True

    def busy() -> bool:
        return frontend.busy or (clients is not None and clients.busy)

    for site in runner.sites:
        await site.stop()
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
    """Waits for the generations under way; a second signal, or the engine's end, cuts it short."""
    end = time.monotonic() + deadline_s
    while busy() and time.monotonic() < end and ending.signals < 2:
        if engine is not None and engine.lost.is_set():
            return
        await asyncio.sleep(0.02)


def _watch_lifeline(options: Options, fd: int, loop: asyncio.AbstractEventLoop, ending: Ending) -> None:
    """A thread, so that it works also while the event loop is busy."""
    try:
        os.fstat(fd)
    except OSError as error:
        raise ValueError(f"lifeline: {fd} is not an open file descriptor: {error.strerror}") from None

    def wait() -> None:
        with suppress(OSError):
            while os.read(fd, 1024):
                pass
        with suppress(RuntimeError):  # the loop may have ended by itself
            loop.call_soon_threadsafe(ending.ask, "the lifeline ended", EXIT_FAILED)
        time.sleep(LIFELINE_GRACE_S)
        _remove_socket(options)
        os._exit(EXIT_FAILED)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _remove_socket(options: Options) -> None:
    if options.own_socket:
        remove_sockets(Path(options.engine.removeprefix("ipc://")).parent)


def parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m splash_trt.frontend.main", description="HTTP for one engine.")
    parser.add_argument("--engine", required=True, metavar="ADDRESS", help="ipc:///path/of/socket of rank 0")
    parser.add_argument("--model-name", required=True, metavar="NAME", help="the model's name for clients")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json; without: token ids only")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument("--max-queued", type=int, default=1024, help="waiting requests at most (default: %(default)s)")
    parser.add_argument("--max-body-bytes", type=int, default=16 << 20, help="default: %(default)s")
    parser.add_argument("--ready-deadline", dest="ready_deadline_s", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--shutdown-deadline", dest="shutdown_deadline_s", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--client-endpoint", metavar="ADDRESS", help="serve local clients here, such as Triton's model")
    parser.add_argument("--lifeline", type=int, metavar="FD", help="end when this pipe does")
    parser.add_argument("--keep-engine", dest="end_engine", action="store_false", help="leave the engine running")
    parser.add_argument("--own-socket", action="store_true", help="remove the engine's socket at the end")
    return Options(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        options = parse(argv)
        try:
            return asyncio.run(run(options))
        finally:
            _remove_socket(options)
    except ValueError as error:
        print(f"frontend: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
