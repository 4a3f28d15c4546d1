"""One HTTP request's part of the engine: submits its prompts, collects their answers, and cancels what is left over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from splash_trt.frontend.engine_client import EngineClient
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.responses import Usage
from splash_trt.frontend.stream import Answer
from splash_trt.request import FinishReason, Request, TokenDelta

log = logging.getLogger(__name__)

SendNow = Callable[[list[int]], bool]


class Generation:
    """One engine request for each answer. Whoever makes it has to call `close`, whatever happens.

    num_choices: so many requests in a row have the same prompt.

    Answers grow as soon as tokens come. What is new is passed to `send_now` at once if possible; only otherwise is the
    task in `run` woken, since waking a task costs as much as all other work for a token.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        requests: Sequence[Request],
        answers: Sequence[Answer],
        num_choices: int = 1,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._meters = [
            metrics.request(len(request.prompt), same_prompt=index % num_choices > 0)
            for index, request in enumerate(requests)
        ]
        self._open = set(range(len(requests)))
        self._grown: dict[int, None] = {}
        """Answers with news that have not been passed on, in order (a dict as an ordered set)."""
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._send_now: SendNow | None = None
        self._num_prompt = sum(len(request.prompt) for request in requests[::num_choices])
        self.answers = answers

    def submit(self) -> None:
        """Sends the requests to the engine. Raises ApiError if there is none."""
        for index, request in enumerate(self._requests):
            self._engine.submit(request, self, index)

    async def run(self, send_now: SendNow | None = None) -> AsyncIterator[list[int]]:
        """Yields the indices of the answers that grew, until all are complete. Raises ApiError if the engine fails.

        send_now: called with these indices as soon as there are any, and returns whether it has sent the news; if not,
        they are yielded here. It is not called while the caller works on what was yielded last.
        """
        while self._open or self._grown or self._error is not None:
            if not self._grown and self._error is None:
                self._send_now = send_now
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = self._send_now = None
            if self._grown:
                grown, self._grown = list(self._grown), {}
                yield grown
            elif self._error is not None:
                self.close("error")
                raise self._error

    def put(self, index: int, delta: TokenDelta) -> None:
        """Takes more of answer `index` from the engine; a call of `flush` has to follow."""
        if index not in self._open:
            return
        if delta.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._open.discard(index)
            self._meters[index].end("error")
            why = delta.error or "the engine cancelled the request"
            self.fail(ApiError(why, status=500, code=f"engine_{delta.finish.value}"))
            return
        answer, meter = self.answers[index], self._meters[index]
        before = answer.num_tokens
        try:
            answer.add(delta)
        except Exception:
            self._fail_by("an answer could not be taken in")
            return
        meter.tokens(answer.num_tokens - before, delta.queued_s)
        self._grown[index] = None
        if answer.finish is not None:
            self._open.discard(index)
            self._engine.cancel(self._requests[index].id)  # it may go on: the engine does not know stop strings
            meter.end(answer.finish)

    def fail(self, error: ApiError) -> None:
        """Makes `run` raise the error when what came before is passed on; a call of `flush` has to follow."""
        self._error = self._error or error

    def flush(self) -> None:
        """Passes on what was put: by send_now, or by waking `run`."""
        if self._waiter is None or self._waiter.done():
            return
        try:
            if self._grown and self._send_now is not None and self._send_now(list(self._grown)):
                self._grown = {}
        except Exception:
            self._fail_by("an answer could not be sent")
        if self._grown or self._error is not None or not self._open:
            self._waiter.set_result(None)

    def _fail_by(self, what: str) -> None:
        """Fails this request because of a bug, which must not end other requests."""
        log.exception("%s: %s", self._requests[0].id, what)
        self.fail(ApiError("the server failed; its log says why", status=500))

    def counts(self) -> Usage:
        """Tokens so far; a prompt with n answers counts once."""
        return Usage.of(self._num_prompt, sum(answer.num_tokens for answer in self.answers))

    def close(self, reason: str = "cancelled") -> None:
        """Cancels the requests that are not complete. reason: for the metrics."""
        for index in self._open:
            self._engine.cancel(self._requests[index].id)
            self._meters[index].end(reason)
        self._open.clear()
