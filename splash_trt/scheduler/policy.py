"""When to change the layout, and to which: compare.py estimates what a change would gain, this file decides whether
that is enough to make it.

The orchestrator asks every now and then and acts on the answer. A policy remembers how long steps take and whether its
last changes paid. While another layout looks better than the present one, what is lost by staying is added up and
counts in favour of the change: so a change can be put off, but not for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from splash_trt.config import EngineConfig, Layout
from splash_trt.migration.diff import Sizes
from splash_trt.plan import Plan, StepResult
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.compare import Candidate, Comparer, Comparison, Objective
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.estimator import Estimator
from splash_trt.scheduler.forecast import Past
from splash_trt.scheduler.load import Load

LOOK_S = 0.1  # least time between two looks at the load
QUIET_LOOK_S = 0.5  # the same while hardly anything changes
SAME = 0.1  # a change of the running requests by less than this share is hardly a change
HYSTERESIS = 0.03  # the least gain that is worth a change, as a share of the time ahead
KNOWN = 0.01  # the same where both layouts have run such batches and hardly any request arrives
SURE = 0.15  # a gain of more than this share of the time ahead needs no second look;
LOOKS = 3  # for a smaller one, so many looks in a row must agree
DWELL_SWITCHES = 2.0  # after a change, a layout is kept for so many times as long as the switch away from it takes,
MIN_DWELL_S = 0.5  # and at least for so long; but not where that would cost more than it could save
MAX_DOUBT = 16.0
PAID = 2**0.5  # each change that paid divides the doubt by this (under a load that turns on purpose half of them pay)
CALM_S = 120.0  # after so long without a change the doubt halves
RETURN_CHANCE = 0.5  # the chance that the load will soon want the present layout again
RETURN_LOSS = 0.2  # share of the way back's time that is lost by still being in the wrong layout
STEP_SPAN_S = 5.0  # the time of a step is averaged over so long, since steps with prompts come only now and then
OBSERVE_EVERY = {True: 8, False: 2}  # one in 8 steps that only decode is observed, and one in 2 of those with prompts


@dataclass(frozen=True)
class Decision:
    """Go to `layout`; or stay in it and move some requests to other owners: owners is {slot: rank}."""

    layout: Layout
    why: str
    kind: str = "load"
    """The reason as one word of a few, to count by: "owners", "room", "prompts" or "load"."""
    owners: dict[int, int] = field(default_factory=dict)


class Policy(Protocol):
    """observe() takes in each step that completed. wants_to_look() says whether decide() is worth calling; decide()
    returns None to stay. resume() is called when an operator hands the decision back. expected_s() is the seconds that
    a plan's rows should take. explain() says what the last look saw, for people to read."""

    def observe(self, plan: Plan, result: StepResult) -> None: ...

    def wants_to_look(self, now: float, running: int, arrived_tokens: int) -> bool: ...

    def decide(self, load: Load) -> Decision | None: ...

    def resume(self) -> None: ...

    def expected_s(self, plan: Plan) -> float: ...

    def explain(self, now: float) -> dict[str, object]: ...


class Doubt:
    """`factor`: how many times the usual gain a change has to promise. Each change that did not pay doubles it, each
    one that paid divides it by PAID, and each CALM_S without a change halves it.

    Without doubt, a load that turns just after each change would be followed for ever, always too late.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._paid = 0.0
        self._cost = 0.0
        self._open = False
        self._before: Layout | None = None
        self._changed = 0.0

    def changed(self, before: Layout, best: Candidate, here: Candidate, now: float) -> None:
        """A change from layout `before` to `best` was decided on, which settles whether the change before it paid."""
        if self._open:
            back = best.layout is self._before
            # If this change undoes the last one, the way back is a part of what the last one cost, and so is what is
            # lost until the way back is done.
            share = max(1 - best.costs[0] / max(here.costs[0], 1e-9), 0.0)
            lost = best.switch.cost_s + best.switch.seconds * share if back else 0.0
            paid = self._paid >= self._cost + lost
            self.factor = max(self.factor / PAID, 1.0) if paid else min(self.factor * 2, MAX_DOUBT)
        self._before, self._cost, self._paid, self._open = before, best.switch.cost_s, 0.0, True
        self._changed = now

    def looked(self, comparison: Comparison, load: Load, since_s: float) -> None:
        """Add what the last change saved during the last since_s: how much longer the old layout would have taken."""
        if load.now - self._changed > CALM_S:
            self.factor, self._changed = max(self.factor / 2, 1.0), load.now
        here = comparison.candidates[0]
        old = next((c for c in comparison.candidates if c.layout is self._before and c.layout is not here.layout), None)
        if self._open and old is not None and here.costs and here.costs[0] > 0:
            self._paid += since_s * (old.costs[0] / here.costs[0] - 1)


class CostPolicy:
    """Follows the load by the cost model. room: distinct tokens that each allowed layout holds."""

    def __init__(
        self,
        cost: CostModel,
        config: EngineConfig,
        sizes: Sizes,
        room: dict[Layout, int],
        objective: Objective | None = None,
    ) -> None:
        self._cost = cost
        self._num_ranks = config.num_ranks
        self._objective = objective or Objective()
        self._comparer = Comparer(Estimator(cost, config, room), config, sizes, room, self._objective)
        self._doubt = Doubt()
        self._past = Past()
        self._room = room
        self._seconds = self._steps = 0.0  # sums over recent steps that fade: their time, and how many they are
        self._observed = {True: 0, False: 0}  # steps so far, by whether they only decode
        self._chunk = config.max_batch_tokens
        self._arrived = self._running = 0  # prompt tokens that had arrived, and requests that ran, at the last look
        self._looked = self._changed = -1e9  # when the last look was, and when the last change was done
        self._wish: tuple[Layout, bool] | None = None  # what looks better than staying (layout, by moving owners)
        self._agreed = 0  # looks in a row that found the same wish
        self._missed = 0.0  # seconds lost by not following it yet
        self._last: tuple[Load, Comparison, str] | None = None  # the last look and its verdict

    def observe(self, plan: Plan, result: StepResult) -> None:
        if not plan.num_tokens:
            return
        fade = math.exp(-result.seconds / STEP_SPAN_S)
        self._seconds = self._seconds * fade + result.seconds
        self._steps = self._steps * fade + 1
        decodes = plan.only_decodes
        self._observed[decodes] += 1
        if self._observed[decodes] % OBSERVE_EVERY[decodes]:
            return
        batch = Batch.of(plan, self._num_ranks)
        here_s = self._cost.step_s(batch) if plan.copies else self._cost.observe(batch, result.seconds)
        each_layout = batch.under_each(self._room)
        step_s = {each.layout: here_s if each is batch else self._cost.step_s(each) for each in each_layout}
        self._past.add(plan.layout, step_s, OBSERVE_EVERY[decodes])

    @property
    def _step_s(self) -> float:
        """The average time of recent steps, with and without prompts."""
        return self._seconds / self._steps if self._steps else 0.0

    def expected_s(self, plan: Plan) -> float:
        return self._cost.step_s(Batch.of(plan, self._num_ranks))

    def wants_to_look(self, now: float, running: int, arrived_tokens: int) -> bool:
        """Whether the load may have changed since the last look. arrived_tokens: of all prompts so far."""
        since = now - self._looked
        if since < LOOK_S:
            return False
        arrived = arrived_tokens - self._arrived
        moved = abs(running - self._running) > SAME * self._running or arrived >= self._chunk
        if since < QUIET_LOOK_S and self._last is not None and self._wish is None and not moved:
            return False
        self._arrived, self._running = arrived_tokens, running
        return True

    def decide(self, load: Load) -> Decision | None:
        since, self._looked = min(load.now - self._looked, 2 * QUIET_LOOK_S), load.now
        if load.is_idle:
            self._last = None
            return None
        comparison = self._comparer.compare(load, self._step_s, self._past)
        self._doubt.looked(comparison, load, since)
        best = comparison.best
        verdict = self._verdict(comparison, best, load, since)
        self._last = (load, comparison, verdict or "go")
        if verdict is not None:
            return None
        self._wish, self._missed = None, 0.0
        self._changed = load.now + best.switch.seconds
        self._doubt.changed(load.layout, best, comparison.candidates[0], load.now)
        owners = {}
        if best.moves_owners:
            homes = zip(load.slots.tolist(), load.home.tolist(), best.homes.tolist(), strict=True)
            owners = {slot: after for slot, before, after in homes if after != before}
        return Decision(best.layout, reason(comparison, best, load), _kind(comparison, best, load), owners)

    def resume(self) -> None:
        """Forget the last change and look, which an operator has overridden. What was learnt of steps stays."""
        self._doubt, self._last, self._wish = Doubt(), None, None
        self._agreed, self._missed = 0, 0.0
        self._looked = self._changed = -1e9

    def _margin(self, load: Load, best: Candidate, ahead_s: float) -> float:
        """The share of the time ahead that a change has to gain."""
        come = load.arriving.per_s * ahead_s
        if best.moves_owners or load.prompt_tokens or come > SAME * load.running:
            return HYSTERESIS
        known = min(self._cost.correction.certainty(layout, load.running) for layout in (load.layout, best.layout))
        return HYSTERESIS + known * (KNOWN - HYSTERESIS)

    def _verdict(self, comparison: Comparison, best: Candidate, load: Load, since_s: float) -> str | None:
        """Why to stay; None to go to `best`."""
        here, now = comparison.candidates[0], load.now
        if best is here:
            self._wish, self._missed = None, 0.0
            return "no layout would be better"
        wish = (best.layout, best.moves_owners)
        if wish != self._wish:
            self._agreed, self._missed = 0, 0.0
        self._wish = wish
        self._agreed += 1
        self._missed += since_s * max(1 - best.costs[0] / max(here.costs[0], 1e-9), 0.0) if self._agreed > 1 else 0.0
        ahead = max(comparison.ahead_s, 1e-9)
        way_back = RETURN_CHANCE * (best.back_cost_s + RETURN_LOSS * best.back_s)
        margin = self._margin(load, best, ahead)
        needed = self._doubt.factor * (margin * max(ahead, best.switch.seconds) + way_back)
        name = best.layout.name.lower()
        if best.gain_s + self._missed < needed:
            return f"{name} would save {best.gain_s:.3g} s, less than the {needed - self._missed:.3g} s to be sure of"
        keep_s = max(DWELL_SWITCHES * best.switch.seconds, MIN_DWELL_S)
        keep_until = self._changed + keep_s
        if now < keep_until and best.gain_s < max(SURE * ahead, keep_s):
            return f"kept for {keep_until - now:.2g} s more after the last change"
        if self._agreed < LOOKS and best.gain_s < SURE * ahead:
            return f"{name} looks better, to be looked at again"
        return None

    def explain(self, now: float) -> dict[str, object]:
        """What the last look saw, for people to read. Nobody looks while the server is idle or a layout is pinned."""
        objective = {"goal": self._objective.goal.value, "p99_step_s": self._objective.p99_step_s}
        if self._last is None:
            return {"objective": objective, "verdict": "idle: nothing to compare", "candidates": []}
        load, comparison, verdict = self._last
        return {
            "objective": objective,
            "layout": load.layout.name.lower(),
            "seconds_ago": now - load.now,
            "load": {
                "running": load.running,
                "waiting": load.waiting,
                "held_tokens": load.held_tokens,
                "prompt_tokens_to_compute": load.prompt_tokens,
                "expected_output_tokens_left": float(load.left.sum()),
                "arrivals_per_s": load.arriving.per_s,
                "step_s": self._step_s,
            },
            "doubt": self._doubt.factor,
            "verdict": verdict,
            "candidates": [_explained(c, self._room) for c in comparison.candidates],
        }


def reason(comparison: Comparison, best: Candidate, load: Load) -> str:
    """Why the change is made, as one line for the switch's record."""
    here = comparison.candidates[0]
    counts = f"{load.running} running, {load.waiting} waiting"
    if load.prompt_tokens:
        counts += f", {load.prompt_tokens} prompt tokens to compute"
    what = "other owners" if best.moves_owners else best.layout.name.lower()
    step = f"{_ms(best.times[0].p99_step_s)} a step against {_ms(here.times[0].p99_step_s)}"
    if _has_more_room(best, here):
        step += f", room for {best.times[0].concurrency:.0f} at once against {here.times[0].concurrency:.0f}"
    saves = f"saves {best.gain_s:.2g} of the next {comparison.ahead_s:.2g} s; takes {best.switch.seconds:.2g} s"
    return f"{what}: {counts}; {step}; {saves}, costs {best.switch.cost_s:.2g} s"


def _kind(comparison: Comparison, best: Candidate, load: Load) -> str:
    if best.moves_owners:
        return "owners"
    if _has_more_room(best, comparison.candidates[0]):
        return "room"
    return "prompts" if load.prompt_tokens > load.held_tokens else "load"


def _has_more_room(best: Candidate, here: Candidate) -> bool:
    """Whether so many more requests can run at once that this is a reason by itself."""
    return best.times[0].concurrency > here.times[0].concurrency * 1.05


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _explained(candidate: Candidate, room: dict[Layout, int]) -> dict[str, object]:
    switch = candidate.switch
    return {
        "layout": candidate.layout.name.lower(),
        "moves_owners": candidate.moves_owners,
        "fits": candidate.fits,
        "room_tokens": room[candidate.layout],
        "gain_s": candidate.gain_s if candidate.fits else None,
        "phases": [
            {"seconds": t.seconds, "p99_step_s": t.p99_step_s, "concurrency": t.concurrency} for t in candidate.times
        ],
        "switch": {
            "route": [layout.name.lower() for layout in switch.route],
            "bytes": round(switch.bytes),
            "steps": switch.steps,
            "seconds": switch.seconds,
            "cost_s": switch.cost_s,
        },
    }
