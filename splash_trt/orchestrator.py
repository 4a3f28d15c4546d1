"""Rank 0's loop: receive, schedule, execute, complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from splash_trt.config import EngineConfig
from splash_trt.memory.map import model_sizes, request_tokens
from splash_trt.models.config import ModelConfig
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, TokenDelta
from splash_trt.scheduler.scheduler import Scheduler
from splash_trt.worker import Worker


class Orchestrator:
    """Drives one scheduler and the ranks. `execute` gives a plan to all ranks and returns its result."""

    def __init__(self, scheduler: Scheduler, execute: Callable[[Plan], StepResult], plans_in_flight: int) -> None:
        self.scheduler = scheduler
        self._execute = execute
        self._plans_in_flight = plans_in_flight
        self._in_flight: deque[StepResult] = deque()

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, worker: Worker) -> Orchestrator:
        """The orchestrator of a model whose rank 0 is `worker`."""
        scheduler = Scheduler(
            config,
            sizes=model_sizes(model, config),
            request_tokens=request_tokens(model, config),
            vocab_size=model.vocab_size,
            max_context=config.context_of(model.max_positions),
            eos_token_ids=model.eos_token_ids,
        )
        return cls(scheduler, worker.send, config.plans_in_flight)

    def add(self, request: Request) -> None:
        """ValueError says why the request cannot be served."""
        self.scheduler.add(request, now=time.monotonic())

    def cancel(self, request_id: str) -> list[TokenDelta]:
        delta = self.scheduler.cancel(request_id)
        return [] if delta is None else [delta]

    def step(self) -> list[TokenDelta]:
        """One turn: a plan goes out if there is anything to compute, and the oldest result that is due comes in."""
        now = time.monotonic()
        deltas = self.scheduler.expire(now)
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self._in_flight.append(self._execute(plan))
        if self._in_flight and (plan is None or len(self._in_flight) == self._plans_in_flight):
            deltas += self.scheduler.complete(self._in_flight.popleft())
        return deltas

    @property
    def idle(self) -> bool:
        """No request is left, no switch is under way, and every plan's result is in."""
        return not (self.scheduler.has_requests or self.scheduler.switcher.busy or self._in_flight)
