"""One HTTP request in the engine: its prompts go in, their answers grow, what is left over is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from splash_trt.frontend.engine_client import EngineClient, Mailbox
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.responses import Usage
from splash_trt.frontend.stream import Answer
from splash_trt.request import FinishReason, Request, TokenDelta


class Generation:
    """One engine request for each answer. Call `close` when done with it, whatever happened.

    num_choices: so many requests in a row have the same prompt.
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
        self._mailbox = Mailbox()
        self._meters = [
            metrics.request(len(request.prompt), same_prompt=index % num_choices > 0)
            for index, request in enumerate(requests)
        ]
        self._open = set(range(len(requests)))
        self._num_prompt = sum(len(request.prompt) for request in requests[::num_choices])
        self.answers = answers

    def submit(self) -> None:
        """ApiError if there is no engine."""
        for index, request in enumerate(self._requests):
            self._engine.submit(request, self._mailbox, index)

    async def run(self) -> AsyncIterator[list[int]]:
        """Yields the indices of the answers that grew, until all are complete. ApiError if the engine fails."""
        while self._open:
            grown: dict[int, None] = {}
            try:
                taken = await self._mailbox.take()
            except ApiError:
                self.close("error")
                raise
            for index, delta in taken:
                if index in self._open:
                    self._add(index, delta)
                    grown[index] = None
            yield list(grown)

    def counts(self) -> Usage:
        """Tokens so far; a prompt counts once, whatever n is."""
        return Usage.of(self._num_prompt, sum(answer.num_tokens for answer in self.answers))

    def close(self, reason: str = "cancelled") -> None:
        """Cancels what is not complete: the client went away, or something failed. reason: for the metrics."""
        for index in self._open:
            self._engine.cancel(self._requests[index].id)
            self._meters[index].end(reason)
        self._open.clear()

    def _add(self, index: int, delta: TokenDelta) -> None:
        if delta.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._open.discard(index)
            self._meters[index].end("error")
            why = delta.error or "the engine cancelled the request"
            raise ApiError(why, status=500, code=f"engine_{delta.finish.value}")
        answer, meter = self.answers[index], self._meters[index]
        before = answer.num_tokens
        answer.add(delta)
        meter.tokens(answer.num_tokens - before, delta.queued_s)
        if answer.finish is not None:
            self._open.discard(index)
            self._engine.cancel(self._requests[index].id)  # a stop string, of which the engine knows nothing
            meter.end(answer.finish)
