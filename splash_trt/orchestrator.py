"""One turn of rank 0: schedule, execute, complete, and now and then ask the policy where to go.

Whoever drives it receives in between: engine_server.py from frontends, llm.py from its caller.
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
    """What one turn of the loop brought. step, num_tokens, seconds, layout: of the step that completed in it, 0 and
    None if none did."""

    deltas: list[TokenDelta] = []
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    layout: Layout | None = None
    preemptions: int = 0
    """Requests that gave their cache up in it."""
    decision: tuple[Layout, Decision] | None = None
    """The policy asked for another layout, and from which."""


class Orchestrator:
    """Drives one scheduler and the ranks. `execute` gives a plan to all ranks and returns what, called, waits for its
    result; `clock` counts seconds.

    With a policy the layout follows the load until an operator pins one.
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
        """Told of every plan and its result."""
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
        """An operator's word: a layout to go to, to stay there if `pin`, or "auto". ValueError if it cannot be."""
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
            "switch": switcher.state.value,
            "why": record.why if record is not None else None,
            "policy": None if self._policy is None else self._policy.explain(self._clock()),
        }

    def step(self) -> list[TokenDelta]:
        """One turn; what it adds to requests."""
        return self.turn().deltas

    def turn(self) -> Turn:
        """A plan goes out if there is anything to do, and the oldest result that is due comes in."""
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
        """Ask the policy, unless a layout is pinned or a switch is under way; (the present layout, its decision)."""
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
