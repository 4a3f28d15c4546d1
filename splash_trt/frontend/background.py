"""Runs blocking work in threads, so that the event loop goes on; a process that ends does not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MAX_AT_ONCE = 2  # a long text takes a hundred times its size in memory while it is encoded


class BackgroundThreads:
    """Like asyncio.to_thread, but a few at a time, and in threads that do not keep the process from ending."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self, function: Callable[[], T]) -> T:
        """The result of function(), or what it raises. If this is cancelled the thread goes on, for nobody."""
        async with self._turns:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[T] = loop.create_future()

            def settle(result: T | None, error: BaseException | None) -> None:
                if future.done():  # cancelled meanwhile
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)  # type: ignore[arg-type]

            def work() -> None:
                result, error = None, None
                try:
                    result = function()
                except Exception as raised:
                    error = raised
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(settle, result, error)

            threading.Thread(target=work, name="background", daemon=True).start()
            return await future
