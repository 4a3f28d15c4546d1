"""Which layout to be in: the shortest path through the phases of work ahead, where changes of layout cost too.

Pure functions over one Load. A candidate is a layout, or the present layout with some requests moved to other owners.
A candidate's gain compares two futures. In one, the switch to it begins now. In the other, the present layout is kept
for the first phase. Both then follow the best path. So a switch that can be made later just as well is not made now,
and a switch that would soon have to be undone pays for both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np
from msgspec.structs import replace

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.migration.budget import scaled
from splash_trt.migration.diff import Sizes
from splash_trt.scheduler import transition
from splash_trt.scheduler.admission import RESERVE_SHARE
from splash_trt.scheduler.balance import rebalanced
from splash_trt.scheduler.estimator import Estimator, Time
from splash_trt.scheduler.forecast import Past
from splash_trt.scheduler.load import Load
from splash_trt.scheduler.phases import Phase, homes_under, phases_of

HORIZON_S = 60.0
"""Work further ahead is not counted: by then another decision will have been made."""
COMMIT_STEPS = 0.1  # what the commit of a switch costs, in steps; measured stalls are shorter
OVER_BOUND = 20.0  # a phase whose steps exceed the bound by x times the bound counts as longer by this many times x


class Goal(str, Enum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a layout is chosen for. p99_step_s: a bound on the time per output token, for throughput under a bound."""

    goal: Goal = Goal.THROUGHPUT
    p99_step_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """ "throughput", "latency", or "bounded:MS": throughput with at most MS milliseconds per output token (p99)."""
        name, _, bound = text.partition(":")
        if name == "bounded":
            try:
                milliseconds = float(bound)
            except ValueError:
                milliseconds = 0.0
            if not 0 < milliseconds < 1e6:
                raise ValueError(f"objective: {text!r}: bounded needs milliseconds, as in bounded:50")
            return cls(p99_step_s=milliseconds / 1e3)
        if bound or name not in ("throughput", "latency"):
            raise ValueError(f"objective: {text!r} is not one of throughput, latency, bounded:MS")
        return cls(goal=Goal(name))

    def weigh(self, time: Time, steps: float) -> float:
        """What a phase costs: seconds, or what has the same meaning for this objective. steps: of the phase at full
        concurrency, the same for all layouts."""
        if self.goal is Goal.LATENCY:
            return steps * time.p99_step_s
        over = 0.0 if self.p99_step_s is None else max(time.p99_step_s / self.p99_step_s - 1, 0.0)
        return time.seconds * (1 + OVER_BOUND * over)


class Switch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a switch that begins now takes."""

    route: tuple[Layout, ...]
    """The layouts on the way, the target last; empty where only owners change."""
    bytes: float
    """What the busiest rank sends and receives."""
    steps: int
    seconds: float
    cost_s: float
    """Seconds that the work ahead is delayed: by slower steps, by admissions that are held, by the commit."""


class Later(msgspec.Struct, frozen=True, gc=False):
    """A switch after one of the phases ahead."""

    cost_s: float
    bytes: float
    """What bounds its steps: sent or received by the busiest rank."""
    few_steps: int

    def seconds(self, budget_bytes: int, step_s: float) -> float:
        """How long the switch takes while each step takes step_s."""
        return (self.bytes / max(scaled(budget_bytes, step_s), 1) + self.few_steps) * step_s


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A layout to be in, or the present one with other owners: what it takes to go there, and what it brings."""

    layout: Layout
    homes: np.ndarray
    """[R] owners or homes there."""
    fits: bool
    """There is room for what is held now."""
    switch: Switch
    back_cost_s: float = 0.0
    back_s: float = 0.0
    """What coming back would cost and take."""
    times: tuple[Time, ...]
    costs: tuple[float, ...]
    """By phase, as the objective weighs them."""
    gain_s: float = 0.0
    """Seconds saved by going there now instead of staying for the first phase, after the cost of the switch."""

    @property
    def moves_owners(self) -> bool:
        """It is the present layout, with some requests moved to other owners."""
        return self.switch.steps > 0 and not self.switch.route


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """candidates[0] means to stay as it is."""

    candidates: tuple[Candidate, ...]
    ahead_s: float
    """What the first phase costs in the present layout: the time that a change now is meant to shorten."""

    @property
    def best(self) -> Candidate:
        return max(self.candidates, key=lambda candidate: candidate.gain_s)


class Comparer:
    """Of one deployment. room: distinct tokens that each allowed layout holds."""

    def __init__(
        self, estimator: Estimator, config: EngineConfig, sizes: Sizes, room: dict[Layout, int], objective: Objective
    ) -> None:
        self._estimator = estimator
        self._config = config
        self._sizes = sizes
        self._room = room
        self._objective = objective
        self._pages = {layout: np.array(sizes.pages[SPECS[layout].residency]) for layout in Layout}
        self._least_pages = {layout: int(pages.min()) for layout, pages in self._pages.items()}

    def compare(self, load: Load, step_s: float, past: Past | None = None) -> Comparison:
        """step_s: what a step takes now. past: recent work, which is assumed to come again after the work at hand:
        what has lasted for some time will last about as long again."""
        phases = phases_of(load, step_s)
        stay = self._candidate(load, phases, load.layout, homes_under(load.layout, load), step_s)
        phases = phases[: _within(stay, HORIZON_S)]
        stay = replace(stay, times=stay.times[: len(phases)], costs=stay.costs[: len(phases)])
        if phases:  # a switch that begins now runs in the steps of the first phase
            step_s = stay.times[0].seconds / max(stay.times[0].steps, 1e-9)
        candidates = [stay]
        moved = self._moved_owners(load)
        if moved is not None:
            candidates.append(self._candidate(load, phases, load.layout, moved, step_s))
        candidates += [
            self._candidate(load, phases, layout, homes_under(layout, load), step_s)
            for layout in self._room
            if layout is not load.layout
        ]
        later = [self._later(load, candidate, candidates, step_s) for candidate in candidates]
        if past is not None and past.step_s > 0:
            again = [_again(c, candidates, later, past, load.budget_bytes) for c in range(len(candidates))]
            candidates = [_with_past(c, phases, cost) for c, cost in zip(candidates, again, strict=True)]
        gains = _gains(candidates, later, load.budget_bytes, self._reaches)
        return Comparison(
            candidates=tuple(
                replace(c, gain_s=gain, back_cost_s=back[0].cost_s, back_s=back[0].seconds(load.budget_bytes, step_s))
                for c, gain, back in zip(candidates, gains, later, strict=True)
            ),
            ahead_s=stay.costs[0] if stay.costs else 0.0,
        )

    def _moved_owners(self, load: Load) -> np.ndarray | None:
        """[R] owners that even out the ranks' work; None if the layout has no owners, or if none should change."""
        if SPECS[load.layout].placement is not PlacementKind.OWNED or load.running < 2:
            return None
        # A request weighs what it adds to its owner's step: the rows it reads, and a token's dense work.
        rows = (load.held + np.minimum(load.left, load.held + 1)).astype(np.float64)
        weight = rows + rows.mean()
        homes = rebalanced(weight, load.home, load.num_ranks)
        return None if np.array_equal(homes, load.home) else homes

    def _candidate(
        self, load: Load, phases: list[Phase], layout: Layout, homes: np.ndarray, step_s: float
    ) -> Candidate:
        times = tuple(self._estimator.time(phase, layout, homes) for phase in phases)
        steps = [phase.tokens / max(phase.running + phase.joining, 1.0) for phase in phases]
        costs = [self._objective.weigh(time, ideal or time.steps) for time, ideal in zip(times, steps, strict=True)]
        return Candidate(
            layout=layout,
            homes=homes,
            fits=layout is load.layout or self._fits(load, layout, homes),
            switch=self._switch(load, load.layout, layout, homes, step_s),
            times=times,
            costs=tuple(costs),
        )

    def _fits(self, load: Load, target: Layout, homes: np.ndarray) -> bool:
        """Whether there is room for what is held now, in the target and during the switch (a switch by way of DOP drops
        replicas first, so it needs no room for both)."""
        if load.held_tokens > self._room[target]:
            return False
        source = load.layout
        most = load.held_tokens // self._sizes.page_tokens + load.running  # pages of all of them, wherever they lie
        if most + load.running // RESERVE_SHARE <= min(self._least_pages[source], self._least_pages[target]):
            return True
        if transition.needs_way_station(source, target, load.used_pages, self._sizes):
            return True
        pages = np.bincount(homes, -(-load.held // self._sizes.page_tokens), load.num_ranks)
        need = transition.pages_meanwhile(source, target, pages)
        before, after = self._pages[source], self._pages[target]
        grows = (need > transition.pages_meanwhile(source, source, pages)) | (after < before)
        return not (grows & (need + load.running // RESERVE_SHARE > np.minimum(before, after))).any()

    def _reaches(self, source: Candidate, target: Candidate, phase: int) -> bool:
        """Whether there will be room to switch from one to the other after a phase: at its end or during the next."""
        if source is target:
            return True
        held, n = min(time.held for time in source.times[phase : phase + 2]), self._config.num_ranks
        here, there = SPECS[source.layout].placement, SPECS[target.layout].placement
        if here is not there and PlacementKind.REPLICATED not in (here, there):
            if 2 * held <= min(self._room[source.layout], self._room[target.layout]):
                return True  # each page is there, and at most once more on its way
            held = float(transition.pages_meanwhile(source.layout, target.layout, np.full(n, held / n)).sum())
            return held <= min(self._room[source.layout], self._room[target.layout])
        return held <= self._room[target.layout]

    def _switch(self, load: Load, source: Layout, target: Layout, homes: np.ndarray, step_s: float) -> Switch:
        """The switch from `source`, given where the running requests' cache lies now."""
        sizes, n = self._sizes, load.num_ranks
        compacted = 0
        route: tuple[Layout, ...] = (target,)
        if source is target:
            moved = transition.owner_traffic(load.held, load.home, homes, n, sizes.row_bytes)
            route = ()
        else:
            moved = transition.traffic(source, target, load.rows, sizes)
            compacted = transition.compacted_pages(source, target, load.used_pages, sizes)
            if Layout.DOP in self._room and transition.needs_way_station(source, target, load.used_pages, sizes):
                route = (Layout.DOP, target)
        busiest, both_ways = moved.busiest, moved.both_ways
        if source is target and not busiest:
            return Switch(route=route, bytes=0.0, steps=0, seconds=0.0, cost_s=0.0)
        making_room = _steps_for(compacted * sizes.page_bytes, load, step_s)
        moving = _steps_for(busiest, load, step_s)
        steps = making_room + moving + transition.FEW_STEPS * max(len(route), 1)
        # While room is being made nobody is admitted: that costs the share of the batch that those who wait would be.
        held = making_room * step_s * min(1.0, load.waiting / max(load.running, 1))
        inside = 2.0 * compacted * sizes.page_bytes
        cost = self._estimator.moved_s(both_ways + inside) + held + COMMIT_STEPS * step_s
        return Switch(route=route, bytes=both_ways, steps=steps, seconds=steps * step_s, cost_s=cost)

    def _later(self, load: Load, source: Candidate, targets: list[Candidate], step_s: float) -> list[Later]:
        """About what it takes to go from one candidate to each of the others after a phase."""
        rows = np.bincount(source.homes, load.held, load.num_ranks)

        def going(target: Candidate) -> Later:
            if source is target:
                return Later(0.0, 0.0, 0)
            if source.layout is target.layout:  # owners are moved now or not at all
                return Later(math.inf if target.moves_owners else 0.0, 0.0, 0)
            moved = transition.traffic(source.layout, target.layout, rows, self._sizes)
            cost = self._estimator.moved_s(moved.both_ways) + COMMIT_STEPS * step_s
            return Later(cost, moved.busiest, transition.FEW_STEPS)

        return [going(target) for target in targets]


def _again(index: int, candidates: list[Candidate], later: list[list[Later]], past: Past, budget_bytes: int) -> float:
    """What recent work costs when it comes again and finds the layout of candidates[index]."""
    here = past.seconds[candidates[index].layout]

    def going(to: int) -> float:
        there, switch = past.seconds[candidates[to].layout], later[index][to]
        seconds = switch.seconds(budget_bytes, past.step_s)
        return there + switch.cost_s + min(1.0, seconds / max(here, 1e-12)) * max(here - there, 0.0)

    return min([here, *(going(to) for to in range(len(candidates)) if to != index)])


def _with_past(candidate: Candidate, phases: list[Phase], again_s: float) -> Candidate:
    """The candidate with what comes after the work ahead added, which may end in any of the phases."""
    costs = [cost + phase.ends * again_s for cost, phase in zip(candidate.costs, phases, strict=True)]
    return replace(candidate, costs=tuple(costs))


def _steps_for(num_bytes: float, load: Load, step_s: float) -> int:
    return transition.steps_for(num_bytes, scaled(load.budget_bytes, step_s))


def _within(stay: Candidate, horizon_s: float) -> int:
    """How many phases begin before the horizon."""
    begins = np.cumsum([0.0, *(time.seconds for time in stay.times[:-1])])
    return int((begins < horizon_s).sum()) if stay.times else 0


Reaches = Callable[[Candidate, Candidate, int], bool]


def _gains(candidates: list[Candidate], later: list[list[Later]], budget_bytes: int, reaches: Reaches) -> list[float]:
    """Each candidate's gain: the cost of staying for the first phase, less that of going there now."""
    num = len(candidates)
    if not candidates[0].costs:
        return [0.0] * num
    best = _best(candidates, later, budget_bytes, reaches)
    gains = [0.0]
    for c in range(1, num):
        there = candidates[c]
        gains.append(best[0][0] - _going(candidates[0], there, c, best) if there.fits else -math.inf)
    return gains


def _best(
    candidates: list[Candidate], later: list[list[Later]], budget_bytes: int, reaches: Reaches
) -> list[list[float]]:
    """[p][c]: the least that phases p, p + 1 … cost if candidate c serves phase p. later[c][d]: from c to d."""
    num_phases, num = len(candidates[0].costs), len(candidates)
    best = [[0.0] * num for _ in range(num_phases)]

    def onward(p: int, c: int, d: int) -> float:
        """The cost of phases p and later, when the switch from c to d begins with phase p. Until it is done, c serves
        phase p."""
        if c == d:
            return best[p][d]
        here, there, time = candidates[c], candidates[d], candidates[c].times[p]
        seconds = later[c][d].seconds(budget_bytes, time.seconds / max(time.steps, 1e-12))
        lag = min(1.0, seconds / max(time.seconds, 1e-12)) * max(here.costs[p] - there.costs[p], 0.0)
        return later[c][d].cost_s + lag + best[p][d]

    for p in reversed(range(num_phases)):
        for c, candidate in enumerate(candidates):
            best[p][c] = candidate.costs[p]
            if p + 1 < num_phases:
                open_to = (d for d in range(num) if reaches(candidate, candidates[d], p))
                best[p][c] += min(onward(p + 1, c, d) for d in open_to)
    return best


def _going(here: Candidate, there: Candidate, index: int, best: list[list[float]]) -> float:
    """The cost of all phases when the switch begins now. Until it is done they are spent in the present layout."""
    left, total = there.switch.seconds, there.switch.cost_s
    for p, time in enumerate(here.times):
        if left >= time.seconds:
            total += here.costs[p]
            left -= time.seconds
            continue
        share = left / time.seconds
        return total + share * here.costs[p] - share * there.costs[p] + best[p][index]
    return total
