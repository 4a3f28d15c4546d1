"""Rank 0's side of a layout switch: before each plan, `advance` takes the switch through as many states as it can.

layout/switch.py lists the states; movement.py chooses what each plan copies; pages come from the ledger.

In the calls, `step` is the number of the plan about to be made, `sent` of the last plan made, and `completed` of the
last plan that all ranks have completed. Nothing here waits: a switch that cannot go on is tried again before the next
plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from splash_trt.cache.placement import Placement, num_pages
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency
from splash_trt.layout.switch import ABORTABLE, Abort, Goal, Record, State, SwitchMachine
from splash_trt.migration.budget import MAX_BUDGET_BYTES, Budget
from splash_trt.migration.diff import Sizes, weight_moves
from splash_trt.migration.targets import Holding, choose_targets, follow
from splash_trt.plan import Plan, StepResult
from splash_trt.scheduler.admission import reserve
from splash_trt.scheduler.ledger import Ledger
from splash_trt.scheduler.meter import Meter
from splash_trt.scheduler.movement import Movement
from splash_trt.scheduler.transition import needs_way_station

KEPT_RECORDS = 1000


class Switcher:
    """Carries out one switch at a time. `layout` and `epoch` are those of the next plan."""

    def __init__(self, config: EngineConfig, ledger: Ledger, sizes: Sizes) -> None:
        self.layout: Layout = config.layout
        self.epoch = 0
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._config = config
        self._ledger = ledger
        self._sizes = sizes
        self._movement = Movement(config, ledger, sizes)
        self._machine = SwitchMachine()
        self._meter = Meter()
        floor = sizes.row_bytes * config.num_ranks
        self._budget = Budget(config.migration_bytes, floor, MAX_BUDGET_BYTES, config.migration_max_slowdown)
        self._route: deque[Goal] = deque()
        self._goal: Goal | None = None
        self._record: Record | None = None
        self._attempt = 0
        self._deadline = 0.0
        self._hold_until = 0.0
        self._retargeted = False
        self._target_pages = np.zeros(config.num_ranks, np.int64)  # [N], by owner or home, while a switch is under way
        self.budget_bytes = self._budget.bytes_per_step
        """What each rank may send, and may receive, for a switch in the plan made last; new rows come on top."""
        self._last_work = 0  # the last plan that ranks must complete before the switch may be committed
        self._drain = 0  # the last plan that may name pages of the side that was given up (old or target)

    def expect(self, step_s: Callable[[Plan], float]) -> None:
        """step_s gives the seconds that a plan's rows should take: what slowdowns are measured against."""
        self._meter.expect(step_s)

    def begin_with(self, num_bytes: int) -> None:
        """Bytes a step that switches begin with from now on, in place of EngineConfig.migration_bytes."""
        self._budget.begin_with(num_bytes)

    # Questions

    @property
    def usual_bytes(self) -> int:
        """The present budget: what each rank may send, and may receive, in a step of 10 ms or less."""
        return self._budget.bytes_per_step

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def record(self) -> Record | None:
        """The switch under way."""
        return self._record

    @property
    def busy(self) -> bool:
        """A switch is under way or waits to begin."""
        return self.state is not State.STEADY or bool(self._route)

    @property
    def told_state(self) -> State:
        """As `state`, but a switch that waits to begin counts as begun: whoever asked for it must not see STEADY."""
        return State.PREPARING if self._route and self.state is State.STEADY else self.state

    @property
    def told_target(self) -> str | None:
        """The layout that was asked for last, also while the switch before it is being ended; None: none is due."""
        if self._route:
            return self._route[-1].layout.name.lower()
        return self._record.target if self._record is not None else None

    @property
    def holds_admissions(self) -> bool:
        """No request is admitted while room is being made for the switch."""
        return self.state is State.PREPARING

    @property
    def attempt(self) -> int:
        """For the plan: the number of the switch while its target tables are in use, else 0."""
        return self._attempt if self.state in (State.PREPARING, State.MIGRATING, State.ARMED) else 0

    def target_for(self, placement: Placement) -> Placement | None:
        """The second placement of a request that is admitted now; None if it needs none."""
        if self._goal is None or self.state not in (State.MIGRATING, State.ARMED):
            return None
        # The future owner of a replicated request already holds its pages, as every rank does: free pages do not tell
        # which rank will own how much, so target pages are counted here.
        home = int(np.argmin(self._target_pages / np.maximum(self._ledger.directory.limits(), 1)))
        return follow(placement, SPECS[self._goal.layout].placement, home)

    # Orders and events

    def request(self, goal: Goal, *, sent: int, now: float) -> None:
        """Switch to `goal` as soon as possible. A switch to another goal that is under way is aborted first.

        ValueError if this deployment may not use the layout, or an owner is no rank or has nothing to own.
        """
        if goal.layout not in self._config.allowed_layouts:
            allowed = ", ".join(layout.name.lower() for layout in self._config.allowed_layouts)
            raise ValueError(f"layout: {goal.layout.name.lower()} is not one that this deployment may use: {allowed}")
        if goal.owners and SPECS[goal.layout].placement is not PlacementKind.OWNED:
            raise ValueError(f"owners: requests have no owner in layout {goal.layout.name.lower()}")
        bad = [rank for rank in goal.owners.values() if not 0 <= rank < self._config.num_ranks]
        if bad:
            raise ValueError(f"owners: {bad[0]} is not a rank from 0 to {self._config.num_ranks - 1}")
        bound_for = self._route[-1] if self._route else self._goal
        if bound_for is not None and (bound_for.layout, bound_for.owners) == (goal.layout, goal.owners):
            return
        self._route.clear()
        if self._goal is not None and (self._goal.layout, self._goal.owners) == (goal.layout, goal.owners):
            return  # the present switch goes there only as a way station: it now ends there
        if self.state in ABORTABLE:
            self.abort(Abort.REPLACED, f"replaced: {goal.why}", sent=sent, now=now)
        if goal.layout is not self.layout or goal.owners:
            self._route.append(goal)

    def yields_room(self, rank: int) -> bool:
        """Whether aborting the switch would free pages of `rank`."""
        if self.state not in ABORTABLE:
            return False
        directory = self._ledger.directory
        lowered = directory.pools[rank].limit < self._sizes.pages[SPECS[self.layout].residency][rank]
        return lowered or directory.target_only(rank)

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """([M, 6] int32, [K, 5] int64) for the next plan's `moves` and `weights`."""
        return self._movement.take(self._record)

    def armed(self, slots: np.ndarray) -> np.ndarray:
        """Plan.armed, [R] bool, for rows of these slots."""
        return self._movement.armed(slots)

    def late_moves(self, slot: np.ndarray, start: np.ndarray, count: np.ndarray, absorbed: np.ndarray) -> np.ndarray:
        """Plan.late_moves, [M, 6] int32, of a plan with these rows, [R] each."""
        return self._movement.late_moves(SPECS[self.layout].tokens, slot, start, count, absorbed, self._record)

    def opened(self, slot: int) -> None:
        """A request was admitted, with a second placement if target_for gave it one."""
        if self.state in (State.MIGRATING, State.ARMED):
            self._movement.arm(slot)
            self._count_target(slot)
        else:
            self._movement.disarm(slot)

    def abort(self, kind: Abort, reason: str, *, sent: int, now: float) -> None:
        """Stay in the old layout, also if further switches were to follow. Only before the commit."""
        assert self._record is not None
        self._route.clear()
        self._machine.to(State.ABORTING, sent, now, self._record)
        self._record.outcome, self._record.abort = f"aborted: {reason}", kind.value
        self._ledger.drop_targets(step=sent)
        limits = self._sizes.pages[SPECS[self.layout].residency]
        self._ledger.directory.set_limits(limits, step=sent if self._record.bytes_between_ranks["weights"] else 0)
        self._forget()
        self._drain = sent

    def stop(self, reason: str, *, sent: int, now: float) -> bool:
        """Stay in the present layout: abort the switch under way and forget those that wait to begin. False if there
        was nothing to stop, or the switch is committed already."""
        waiting = bool(self._route)
        self._route.clear()
        if self.state in ABORTABLE:
            self.abort(Abort.ASKED, reason, sent=sent, now=now)
            return True
        return waiting

    def completed(self, plan: Plan, result: StepResult, *, sent: int, now: float) -> bool:
        """Take in a step's result: its times, for the record and the budget, and the ranks' statuses.

        True: copying new rows failed in a plan that was in flight when the switch was committed. The new layout lacks
        these rows, so the requests with armed rows in this plan have to be computed again.
        """
        found = self._meter.step(plan, result, self._background_bytes(plan))
        if found is not None:
            self._budget.observe(found)
        failed = [(rank, status.error) for rank, status in enumerate(result.statuses) if status.error]
        if failed and self.state in ABORTABLE and plan.attempt == self._attempt:
            why = f"rank {failed[0][0]} could not copy: {failed[0][1]}"
            self.abort(Abort.COPY_FAILED, why, sent=sent, now=now)
        return bool(failed) and self.state is State.RETIRING and plan.attempt == self._attempt

    def _background_bytes(self, plan: Plan) -> int:
        """What the busiest rank sent, received or copied inside itself; 0 for a plan that copies only new rows."""
        if not len(plan.moves) and not len(plan.weights):
            return 0
        moved = plan.copied_bytes(self._config.num_ranks, self._sizes.row_bytes, self._sizes.itemsize)
        return int(np.max(moved))

    # Before each plan

    def advance(self, *, step: int, sent: int, completed: int, now: float) -> None:
        """Take the switch as far as it can go now, and choose what plan `step` moves before its rows run."""
        self._movement.drop_planned()
        self._last_work = min(self._last_work, sent)  # a plan that turned out empty was never sent
        self.budget_bytes = self._budget.in_time(self._movement.bytes_left, self._deadline - now, self._meter.step_s)
        if self.state in ABORTABLE and now > self._deadline:
            self.abort(Abort.DEADLINE, f"not done within {self._config.switch_deadline_s:g} s", sent=sent, now=now)
        if self.state in (State.RETIRING, State.ABORTING) and completed >= self._drain:
            self._settle(sent, now)
        if self.state is State.STEADY and self._route:
            self._begin(self._route.popleft(), sent, now)
        if self.state is State.PREPARING:
            self._prepare(step, sent, now)
        if self.state is State.MIGRATING:
            self._migrate(step, sent, now)
        if self.state is State.ARMED and completed >= self._last_work:
            self._commit(sent, now)

    def _begin(self, goal: Goal, sent: int, now: float) -> None:
        """Begin the switch to `goal`: by way of DOP if the incoming heads need memory that replicated cache takes."""
        used = self._ledger.directory.live_pages() + reserve(self._ledger.running_at)
        if Layout.DOP in self._config.allowed_layouts and needs_way_station(
            self.layout, goal.layout, used, self._sizes
        ):
            self._route.appendleft(goal)
            goal = Goal(layout=Layout.DOP, why=f"{goal.why} (first make room for all heads)")
        there = SPECS[goal.layout]
        self._goal = goal
        self._attempt += 1
        self._deadline = now + self._config.switch_deadline_s
        self._hold_until = now + self._config.switch_hold_s
        name = goal.layout.name.lower()
        self._record = Record(
            number=self._attempt, source=self.layout.name.lower(), target=name, why=goal.why, begin_step=sent
        )
        self.records.append(self._record)
        self._meter.begin()
        self._machine.to(State.PREPARING, sent, now, self._record)
        if there.residency is Residency.FULL:
            self._ledger.directory.set_limits(self._sizes.pages[Residency.FULL])

    def _prepare(self, step: int, sent: int, now: float) -> None:
        """Give every running request a second placement, and empty the top of the arena if heads will come there. When
        both are done, migrating begins."""
        assert self._goal is not None and self._record is not None
        directory = self._ledger.directory
        if not self._retargeted:
            targets = self._targets()
            need = np.zeros(self._config.num_ranks, np.int64)
            for slot, target in targets:
                entry = self._ledger.entry(slot)
                need += directory.needed_by(entry.placement, target, 0, entry.num_pages)
            live = directory.live_pages()
            tighter = (need > live) | (directory.limits() < self._sizes.pages[SPECS[self.layout].residency])
            lacking = need + np.where(tighter, reserve(self._ledger.running_at), 0) - directory.limits()
            if (lacking > 0).any():
                if now >= self._hold_until:
                    rank = int(lacking.argmax())
                    why = f"no room: rank {rank} lacks {lacking[rank]} pages"
                    self.abort(Abort.NO_ROOM, why, sent=sent, now=now)
                return
            if (need - live > directory.free_pages()).any():
                return  # there will be room once pages that are leaving are free
            for slot, target in targets:
                self._ledger.retarget(slot, target)
                self._movement.arm(slot)
                self._count_target(slot)
                self._last_work = step  # ranks must have the target tables before the commit
            self._retargeted = True
        pages = max(1, self.budget_bytes // self._sizes.page_bytes)
        above = directory.live_above()
        moved = 0
        for rank in np.flatnonzero(above).tolist():
            moved += self._ledger.compact(rank, directory.pools[rank].limit, pages, step=step)
        self._record.bytes_inside_ranks += moved * self._sizes.page_bytes
        if above.any() and not moved and now >= self._hold_until:
            rank = int(np.argmax(above))
            why = f"no room: rank {rank} has nowhere to put {above[rank]} pages"
            self.abort(Abort.NO_ROOM, why, sent=sent, now=now)
            return
        if not directory.top_held().any():
            residency = SPECS[self.layout].residency
            self._movement.bring(weight_moves(residency, SPECS[self._goal.layout].residency, self._sizes))
            self._record.rows_to_move = self._movement.rows_to_move
            self._machine.to(State.MIGRATING, sent, now, self._record)

    def _targets(self) -> list[tuple[int, Placement]]:
        """(slot, second placement) of every running request."""
        assert self._goal is not None
        slots, holdings = self._ledger.live().tolist(), []
        for slot in slots:
            sequence = self._ledger.slots.sequence(slot)
            entry = self._ledger.entry(slot)
            final = num_pages(sequence.limit, self._config.page_tokens)
            holdings.append(Holding(sequence.id, entry.placement, entry.num_pages, final))
        # At a way station, ranks must not get more than they can hold at the end of the route.
        last = self._route[-1] if self._route else self._goal
        limits = np.array(self._sizes.pages[SPECS[last.layout].residency])
        kind = SPECS[self._goal.layout].placement
        return list(zip(slots, choose_targets(kind, holdings, limits, self._goal.owners), strict=True))

    def _migrate(self, step: int, sent: int, now: float) -> None:
        """Move as much as the budget allows in the next plan; when everything is in a plan, the switch is armed."""
        assert self._record is not None
        if self._meter.wants_still():
            return
        if self._movement.fill(self.budget_bytes, self._record):
            self._last_work = step
        if self._movement.all_planned:
            self._last_work = max(self._last_work, sent)
            self._machine.to(State.ARMED, sent, now, self._record)

    def _commit(self, sent: int, now: float) -> None:
        """The next plan is the first one in the new layout."""
        assert self._goal is not None and self._record is not None
        self._ledger.commit_targets(step=sent)
        self._machine.to(State.RETIRING, sent, now, self._record)
        self.layout = self._goal.layout
        self.epoch += 1
        self._record.outcome = "committed"
        self._meter.commit(sent + 1, self._record)
        self._forget()
        self._drain = sent

    def _settle(self, sent: int, now: float) -> None:
        """No plan in flight names pages of the side that was given up: the switch has ended, and the arena has the
        bounds of the layout that serves."""
        assert self._record is not None
        self._ledger.directory.set_limits(self._sizes.pages[SPECS[self.layout].residency])
        self._record.slowdown = self._meter.slowdown()
        self._machine.to(State.STEADY, sent, now, self._record)
        self._record.ended = True
        self._record = None

    def _count_target(self, slot: int) -> None:
        entry = self._ledger.entry(slot)
        assert entry.target is not None
        self._target_pages[entry.target.home] += max(entry.num_pages, 1)

    def _forget(self) -> None:
        self._target_pages[:] = 0
        self._goal = None
        self._retargeted = False
        self._movement.forget()
