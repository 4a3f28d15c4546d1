"""How the budgets of switches develop, by simulation: `python -m perf.migration.steering`.

Budget and Meter get steps like those of two GPUs: of 10 to 13 ms, which vary by 0.5 to 1 % and sometimes by much more,
become longer as contexts grow, and are slowed down by a switch in proportion to its bytes, and by some amount however
little moves. Printed are a switch's steps and rate, and the true slowdown by its bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from splash_trt.config import Layout
from splash_trt.migration.budget import MAX_BUDGET_BYTES, Budget
from splash_trt.plan import Plan, StepResult
from splash_trt.scheduler.meter import Meter

LAYOUTS = tuple(Layout.parse(name) for name in "tp dp tp cp tp dop dp cp dp dop cp dop".split())
REFERENCE_BYTES = 100_000_000
STALL_SHARE, STALL = 0.01, 0.2  # this share of steps takes longer, by up to this much, for other reasons


class Load(NamedTuple):
    """What is simulated."""

    cost: float
    """By how much a step that moves REFERENCE_BYTES in each 10 ms is slower (1: by 100 %)."""
    noise: float = 0.01
    """Standard deviation of a step's time, relative to it."""
    growth: float = 1e-4
    """By how much each step is longer than the one before, relative to the first one."""
    armed: float = 0.003
    """By how much all steps of a switch are slower, however little they move."""
    launch: float = 0.0
    """By how much steps that move anything are slower, besides `cost`."""
    switch_bytes: tuple[int, ...] = (900_000_000, 2_500_000_000)
    """The bytes of each switch on the rank that moves most, in turn: heads alone, heads and rows."""
    step_s: float = 0.011
    """The time of the first step."""
    around: int = 60
    """Steps between switches."""
    start_bytes: int = 96 << 20
    floor_bytes: int = 1 << 17
    max_slowdown: float = 0.005


class Moved(NamedTuple):
    """What came of one switch."""

    steps: int
    """How many steps moved something."""
    rate_gb_s: float
    """The rate of moving in those steps."""
    slowdown: float
    """The median of those steps' true slowdown by their bytes."""
    budget: int
    """Bytes of a step at the end."""


class Steered:
    """A meter and a budget, used as the switcher uses them."""

    def __init__(self, load: Load) -> None:
        self.budget = Budget(load.start_bytes, load.floor_bytes, MAX_BUDGET_BYTES, load.max_slowdown)
        self._meter = Meter()

    def begin(self) -> None:
        self._meter.begin()

    def next_bytes(self, left: int) -> int:
        """How many of the bytes that are left the next step of a switch may move."""
        return 0 if self._meter.wants_still() else min(left, self.budget.in_time(left, 1e6, self._meter.step_s))

    def completed(self, plan: Plan, result: StepResult, num_bytes: int) -> None:
        found = self._meter.step(plan, result, num_bytes)
        if found is not None:
            self.budget.observe(found)


def plan_of(layout: Layout, attempt: int) -> Plan:
    """A plan of 64 tokens, one of each request."""
    rows, ones = np.arange(64, dtype=np.int32), np.ones(64, np.int32)
    shape: dict[str, Any] = {"slot": rows, "start": rows, "count": ones, "home": rows, "want_index": rows[:0]}
    shape |= {"absorbed": ones > 0, "token": rows.astype(np.int64), "want_target": np.zeros(0, np.int64)}
    return Plan(step=0, epoch=0, layout=layout, counts=np.array([64], np.int32), attempt=attempt, **shape)


def simulate(load: Load, seed: int, switches: int, steered: Any = None) -> list[Moved]:
    """Simulates switches of one server, in the order of a tour. steered: to be tried instead of Steered."""
    random, step, found = np.random.default_rng(seed), 0, []
    steered = Steered(load) if steered is None else steered
    empty = StepResult.empty(0)
    for number in range(switches):
        layout, left = LAYOUTS[number % len(LAYOUTS)], load.switch_bytes[number % len(load.switch_bytes)]
        before, during = plan_of(layout, 0), plan_of(layout, number + 1)
        moves: list[tuple[int, float, float]] = []  # bytes, seconds, slowdown by them
        waiting = load.around
        while waiting or left:
            step_s = load.step_s * (1 + load.growth * step)
            num_bytes = 0 if waiting else steered.next_bytes(left)
            by_bytes = load.cost * num_bytes / REFERENCE_BYTES * 0.01 / step_s
            slower = by_bytes + load.launch * (num_bytes > 0) + load.armed * (not waiting)
            jitter = load.noise * random.standard_normal() + STALL * random.random() * (random.random() < STALL_SHARE)
            seconds = step_s * (1 + slower) * max(1 + jitter, 0.1)
            if num_bytes:
                moves.append((num_bytes, seconds, by_bytes))
            result = msgspec.structs.replace(empty, seconds=seconds)
            steered.completed(before if waiting else during, result, num_bytes)
            left, step = left - num_bytes, step + 1
            if waiting:
                waiting -= 1
                if not waiting:
                    steered.begin()
        total, taken, _ = np.sum(moves, axis=0)
        slow = float(np.median([by_bytes for _, _, by_bytes in moves]))
        found.append(Moved(len(moves), total / taken / 1e9, slow, steered.budget.bytes_per_step))
    return found


SIZES = (900_000_000, 2_500_000_000, 900_000_000, 7_000_000_000)  # there are more rows as contexts grow
CASES = {
    **{f"{100 * cost:.1f} % for 100 MB": Load(cost=cost) for cost in (0.003, 0.006, 0.01)},
    "0.6 %, steps vary by 0.5 %": Load(cost=0.006, noise=0.005),
    "0.6 %, 1.5 % however little moves": Load(cost=0.006, armed=0.015),
    "0.3 %, 0.3 % for moving at all": Load(cost=0.003, launch=0.003),
    "no cost, steps vary by 10 %": Load(cost=0.0, noise=0.1),
    "30 % for 100 MB": Load(cost=0.3),
}
SEEDS, TOURS = 20, 3


def row(name: str, load: Load, steered: Callable[[Load], Any] = Steered) -> str:
    """A line of the table: the median switch of the first and of the last tour, and the slowest of all switches."""
    runs = [simulate(load, seed, TOURS * len(LAYOUTS), steered(load)) for seed in range(SEEDS)]
    cells = [name]
    for tour in (slice(None, len(LAYOUTS)), slice(-len(LAYOUTS), None)):
        mine = np.array([moved for run in runs for moved in run[tour]])
        steps, rate, slow, _ = np.median(mine, axis=0)
        cells.append(f"{steps:.0f} steps, {rate:.1f} GB/s, {100 * slow:.2f} %")
    every = np.array([moved for run in runs for moved in run])
    cells.append(f"{every[:, 0].max():.0f} steps, {every[:, 1].min():.1f} GB/s")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    print("| steps are slower by | first tour | third tour | slowest switch |\n|---|---|---|---|")
    for name, load in CASES.items():
        print(row(name, load._replace(switch_bytes=SIZES)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
