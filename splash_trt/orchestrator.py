"""Rank 0's loop, one turn at a time: schedule a plan, have it executed, complete the oldest plan in flight. Now and
then the policy is asked which layout to be in.

Requests arrive between turns: engine_server.py takes them from frontends, llm.py from its caller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.board import Watch
from splash_trt.memory.map import capacity, model_sizes, request_tokens
from splash_trt.models.config import ModelConfig
from splash_trt.observe.trace import Observer
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, TokenDelta
from splash_trt.scheduler.compare import Objective
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.device import Device
from splash_trt.scheduler.policy import CostPolicy, Decision, Policy
from splash_trt.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # what is simulated needs no ranks, and no torch
    from splash_trt.worker import Worker


def cost_policy(model: ModelConfig, config: EngineConfig, device: Device, objective: Objective) -> CostPolicy:
    """The policy of a deployment whose ranks run on such devices."""
    room = {layout: capacity(model, config, layout).total_tokens for layout in config.allowed_layouts}
    return CostPolicy(CostModel(model, config, device), config, model_sizes(model, config), room, objective)


def scheduler_of(model: ModelConfig, config: EngineConfig) -> Scheduler:
    """The scheduler of a model's deployment; ValueError names the rank that lacks memory."""
    return Scheduler(
        config,
        sizes=model_sizes(model, config),
        request_tokens=request_tokens(model, config),
        vocab_size=model.vocab_size,
        max_context=config.context_of(model.max_positions),
        eos_token_ids=model.eos_token_ids,
    )


class Turn(msgspec.Struct, frozen=True):
    """What one turn of the loop brought. step, num_tokens, seconds and layout are those of the step that completed in
    this turn; 0 and None if none did."""

    deltas: list[TokenDelta] = []
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    layout: Layout | None = None
    preemptions: int = 0
    """How many requests gave their cache up in this turn."""
    decision: tuple[Layout, Decision] | None = None
    """If the policy asked for another layout: (the layout at that time, what it decided)."""


class Orchestrator:
    """Drives the scheduler and the ranks.

    execute: sends a plan to all ranks and returns a function that waits for its result (Worker.send).
    plans_in_flight: the most plans that are sent before the oldest one's result is waited for.
    policy: chooses the layout until an operator pins one; None: the layout changes only when an operator asks.
    watch: rank 0's row on the board (dist/board.py), which says when it is scheduling. clock: seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Callable[[Plan], Callable[[], StepResult]],
        plans_in_flight: int,
        *,
        policy: Policy | None = None,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._execute = execute
        self._plans_in_flight = plans_in_flight
        self._policy = policy
        self._watch = watch
        self._clock = clock
        self._auto = policy is not None
        if policy is not None:
            scheduler.switcher.expect(policy.expected_s)
        self.observer: Observer | None = None
        """Is told of every plan and of its result."""
        self._in_flight: deque[tuple[Plan, Callable[[], StepResult]]] = deque()

    @classmethod
    def of(
        cls, model: ModelConfig, config: EngineConfig, worker: Worker, policy: Policy | None = None
    ) -> Orchestrator:
        """The orchestrator of a model whose rank 0 is `worker`."""
        return cls(
            scheduler_of(model, config),
            worker.send,
            config.plans_in_flight,
            policy=policy,
            watch=worker.world.watch,
        )

    @property
    def mode(self) -> str:
        """ "auto" while the policy decides, else "pinned"."""
        return "auto" if self._auto else "pinned"

    def add(self, request: Request) -> None:
        """ValueError says why the request cannot be served."""
        self.scheduler.add(request, now=self._clock())

    def cancel(self, request_id: str) -> list[TokenDelta]:
        delta = self.scheduler.cancel(request_id)
        return [] if delta is None else [delta]

    def set_layout(self, name: str, *, pin: bool = False) -> None:
        """An operator asks for a layout by its name; with `pin` the policy will not leave it. "auto": from now on the
        policy decides again. ValueError if this deployment cannot do that."""
        if name.lower() == "auto":
            if self._policy is None:
                raise ValueError("layout: 'auto' is not possible, this deployment was started with one layout")
            if not self._auto:
                self._policy.resume()
            self._auto = True
            return
        layout = Layout.parse(name)
        if layout is self.scheduler.layout:
            self.scheduler.abort_switch("an operator asked to stay")
        else:
            self.scheduler.switch(layout, "an operator asked for it")
        self._auto = self._auto and not pin

    def explain(self) -> dict[str, object]:
        """Why the layout is what it is, for people to read."""
        switcher = self.scheduler.switcher
        record = switcher.record
        return {
            "mode": self.mode,
            "layout": switcher.layout.name.lower(),
            "switch": switcher.told_state.value,
            "why": record.why if record is not None else None,
            "policy": None if self._policy is None else self._policy.explain(self._clock()),
        }

    def step(self) -> list[TokenDelta]:
        """One turn; returns only what it adds to requests."""
        return self.turn().deltas

    def turn(self) -> Turn:
        """Send a plan if there is anything to do. Then, if as many plans are in flight as may be, or if there was
        nothing to send, wait for the oldest one's result and complete it."""
        if self._watch is not None:
            self._watch.scheduling()
        turn = self._turn()
        if self._watch is not None:
            self._watch.end_step()
        return turn

    def _turn(self) -> Turn:
        now = self._clock()
        preempted = self.scheduler.preemptions
        deltas = self.scheduler.expire(now)
        decision = self._follow_load(now)
        plan = self.scheduler.schedule(now)
        switcher = self.scheduler.switcher
        if self.observer is not None:
            self.observer.planned(plan, switcher.state.value, switcher.record, self._clock())
        if plan is not None:
            self._in_flight.append((plan, self._execute(plan)))
        if not self._in_flight or (plan is not None and len(self._in_flight) < self._plans_in_flight):
            return Turn(deltas, preemptions=self.scheduler.preemptions - preempted, decision=decision)
        done, wait = self._in_flight.popleft()
        result = wait()
        deltas += self.scheduler.complete(result)
        if self.observer is not None:
            self.observer.completed(done, result, switcher.state.value, switcher.record, self._clock())
        if self._policy is not None:
            self._policy.observe(done, result)
        preemptions = self.scheduler.preemptions - preempted
        return Turn(deltas, done.step, done.num_tokens, result.seconds, done.layout, preemptions, decision)

    def _follow_load(self, now: float) -> tuple[Layout, Decision] | None:
        """Ask the policy, unless a layout is pinned or a switch is under way, and begin the switch that it decides on.
        Returns (the present layout, the decision); None to stay."""
        if self._policy is None or not self._auto or self.scheduler.switcher.busy:
            return None
        scheduler = self.scheduler
        if not self._policy.wants_to_look(now, scheduler.num_running, scheduler.outlook.arrived_tokens):
            return None
        decision = self._policy.decide(self.scheduler.load(now))
        if decision is None:
            return None
        source = self.scheduler.layout
        self.scheduler.switch(decision.layout, decision.why, owners=self.scheduler.owners(decision.owners))
        return source, decision

    @property
    def idle(self) -> bool:
        """No request is left, no switch is under way, and every plan's result is in."""
        return not (self.scheduler.has_requests or self.scheduler.switcher.busy or self._in_flight)
