"""All interleavings of plans, results, switches, aborts and cancels, for two ranks and three requests.

A node is a whole scheduler with its simulated ranks. From every node each move that is possible is taken: a plan is
made, the oldest result comes back, an operator asks for a layout, aborts, or a request is cancelled, the last three as
often as the bounds allow. Nodes that are alike up to step numbers are visited once. In every node and move hold: what
CheckedScheduler checks of plans, pages and budgets, what SimulatedRanks check of rows and heads, the tokens so far, and
that either layout is whole. Where nothing more can happen, everything must have been given back.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest

from splash_trt.cache.pool import GONE
from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS
from splash_trt.layout.switch import State
from splash_trt.plan import encode
from splash_trt.scheduler.meter import STILL_EVERY
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

REQUESTS = (request("a", 3, 3), request("b", 2, 3), request("c", 1, 3))
EXPECTED = {r.id: expected_tokens(r) for r in REQUESTS}


@dataclass(frozen=True)
class Bounds:
    """How often each may still happen."""

    switches: int
    aborts: int
    cancels: int


class Node:
    """A scheduler and what may still be done to it."""

    def __init__(self, c: CheckedScheduler, left: Bounds) -> None:
        self.c, self.left = c, left

    def moves(self) -> Iterator[tuple[str, object]]:
        c = self.c
        in_flight = c.num_in_flight
        if in_flight < c.config.plans_in_flight and not (c.idle and not c.switcher.busy):
            yield "plan", None
        if in_flight:
            yield "result", None
        if c.idle:
            return
        if self.left.switches:
            for layout in c.config.allowed_layouts:
                yield "switch", layout
        if self.left.aborts and c.switcher.busy:
            yield "abort", None
        if self.left.cancels:
            for r in REQUESTS:
                if r.id not in c.outputs.finish:
                    yield "cancel", r.id

    def after(self, name: str, what: object) -> Node:
        node = Node(copy.deepcopy(self.c), self.left)
        c = node.c
        if name == "plan":
            c.schedule()
            c.plans.clear()
            c.traffic.clear()
        elif name == "result":
            c.complete()
        elif name == "switch":
            assert isinstance(what, Layout)
            c.scheduler.switch(what, "test")
            node.left = replace(self.left, switches=self.left.switches - 1)
        elif name == "abort":
            c.scheduler.abort_switch("test")
            node.left = replace(self.left, aborts=self.left.aborts - 1)
        else:
            c.cancel(str(what))
            node.left = replace(self.left, cancels=self.left.cancels - 1)
        node.check()
        return node

    def check(self) -> None:
        c = self.c
        c.scheduler.directory.check()
        kind = SPECS[c.scheduler.layout].placement
        for name in c.scheduler.directory:
            entry = c.scheduler.directory[name]
            assert entry.placement.kind is kind, "a request is placed for another layout"
            under_way = c.switcher.state in (State.PREPARING, State.MIGRATING, State.ARMED)
            assert entry.target is None or under_way, "a second placement outlives its switch"
        for name, tokens in c.outputs.tokens.items():
            assert tokens == EXPECTED[name][: len(tokens)], "a token was lost, repeated or changed"

    def check_end(self) -> None:
        self.c.scheduler.check_idle()
        assert self.c.switcher.state is State.STEADY
        for name, tokens in EXPECTED.items():
            if self.c.outputs.finish[name].value == "length":
                assert self.c.outputs.tokens[name] == tokens

    def key(self) -> Hashable:
        """Everything that the future depends on. What the meter and the budget have measured is left out: the budget
        does not change in runs as short as these."""
        return self.left, scheduler_key(self.c), ranks_key(self.c)


def scheduler_key(c: CheckedScheduler) -> Hashable:
    """Rank 0's state, with steps, epochs and attempts relative to now."""
    s, switcher, directory = c.scheduler, c.switcher, c.scheduler.directory
    ledger, slots, movement = s._ledger, s._slots, switcher._movement
    sent, done = s._step, s._done
    live = ledger.live().tolist()
    return (
        tuple(
            (name, q.slot, len(q.tokens), max(q.last_row, done) - sent, q.finish)
            for name, q in sorted(s._sequences.items())
        ),
        tuple((slot, slots.sequence(slot).id) for slot in live),
        tuple(tuple(array[live].tolist()) for array in (slots.total, slots.admitted, slots.computed, slots.home)),
        tuple(sorted(slots._free)),
        tuple(sorted((max(step, done) - sent, slot) for step, slot in ledger._closed)),
        tuple(
            encode(
                msgspec.structs.replace(
                    f.plan, step=0, epoch=f.plan.epoch - switcher.epoch + 9, attempt=bool(f.plan.attempt)
                )
            )
            for f in s._in_flight
        ),
        tuple(
            (name, entry.placement, entry.table.tobytes(), entry.target, entry.target and entry.target_table.tobytes())
            for name, entry in sorted((name, directory[name]) for name in directory)
        ),
        tuple((max(left.step, done) - sent, left.ranks.tobytes(), left.pages.tobytes()) for left in directory._leaving),
        tuple((pool.limit, pool._states.tobytes().rstrip(bytes([GONE]))) for pool in directory.pools),
        (sent - done, switcher.layout, switcher.state, str(switcher._goal), str(switcher._route)),
        switcher._meter._asked % STILL_EVERY if switcher.busy else 0,
        (switcher._retargeted, max(switcher._last_work, done) - sent, max(switcher._drain, done) - sent),
        switcher.record is not None and bool(switcher.record.bytes_between_ranks["weights"]),
        tuple(tuple(array[live].tolist()) for array in (movement._armed, movement._backlog, movement._moved)),
        tuple(movement._heads),
        tuple((name, len(tokens), c.outputs.finish.get(name)) for name, tokens in sorted(c.outputs.tokens.items())),
        tuple(sorted(c._decoding)),
    )


def ranks_key(c: CheckedScheduler) -> Hashable:
    """What ranks hold for requests that live: tables, written rows, heads."""
    ranks, live = c.ranks, set(c.scheduler._ledger.live().tolist())
    lives = {ranks._life[slot]: slot for slot in live if slot in ranks._life}
    tables = tuple(
        tuple(sorted(item for item in table.items() if item[0][0] in live))
        for state in ranks._ranks
        for table in (state.table, state.target)
    )
    rows = tuple(
        tuple(
            sorted(
                (page, offset, lives[row.life], row.position)
                for page, content in state.pages.items()
                for offset, row in enumerate(content)
                if row is not None and row.life in lives
            )
        )
        for state in ranks._ranks
    )
    assert ranks._weights is not None
    heads = tuple(tuple(sorted(parts)) for parts in ranks._weights._arrived.values())
    behind = c.switcher.epoch - ranks._epoch, bool(ranks._attempt), ranks._attempt == c.switcher.attempt
    return tables, rows, heads, behind


def explore(layout: Layout, plans_in_flight: int, bounds: Bounds, *, pages: int = 8) -> Counter[str]:
    """Visit every node; counts nodes, moves, ends and the switches' outcomes at the ends.

    pages: of each rank, two of which the other rank's heads take.
    """
    c = CheckedScheduler(
        (pages, pages),
        full_pages=(pages - 2, pages - 2),
        heads=(1, 0),
        layout=layout,
        layouts=tuple(Layout),
        plans_in_flight=plans_in_flight,
        page_tokens=2,
        max_running=3,
        max_batch_tokens=4,
        migration_bytes=1,
        switch_hold_s=0,
    )
    c.add(*REQUESTS)
    first = Node(c, bounds)
    seen = {first.key()}
    found: Counter[str] = Counter(nodes=1)
    waiting: deque[tuple[Node, tuple[tuple[str, object], ...]]] = deque([(first, ())])
    while waiting:
        node, path = waiting.popleft()
        moves = list(node.moves())
        if not moves:
            node.check_end()
            found["ends"] += 1
            found.update(r.outcome.partition(":")[0] for r in node.c.switcher.records)
            continue
        progress = False
        for move in moves:
            try:
                after = node.after(*move)
            except (AssertionError, KeyError, IndexError, RuntimeError) as error:
                raise AssertionError(f"after {[*path, move]}: {error}") from error
            found["moves"] += 1
            key = after.key()
            progress |= move[0] in ("plan", "result") and key != node.key()
            if key not in seen:
                seen.add(key)
                found["nodes"] += 1
                waiting.append((after, (*path, move)))
        assert progress, f"stuck after {path}: {node.c.switcher.state}, {node.c.scheduler.num_waiting} waiting"
    return found


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_switch_and_an_abort_at_every_moment(layout: Layout, plans_in_flight: int) -> None:
    found = explore(layout, plans_in_flight, Bounds(1, 1, 0))
    assert found["nodes"] > 150 and found["committed"] and found["aborted"]


def test_two_switches_at_every_moment() -> None:
    """The second one often comes while the first is under way."""
    found = explore(Layout.DOP, 2, Bounds(2, 0, 0))
    assert found["nodes"] > 1000 and found["committed"] and found["aborted"]


def test_a_switch_and_a_cancel_at_every_moment() -> None:
    found = explore(Layout.TP, 1, Bounds(1, 0, 1))
    assert found["nodes"] > 1000 and found["committed"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pages", [8, 5])
@pytest.mark.parametrize("bounds", [Bounds(2, 1, 0), Bounds(1, 1, 1)], ids=str)
@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("layout", list(Layout))
def test_more_of_everything_at_every_moment(layout: Layout, plans_in_flight: int, bounds: Bounds, pages: int) -> None:
    """Five pages are too few for three requests beside all heads: some are preempted, and switches find no room."""
    found = explore(layout, plans_in_flight, bounds, pages=pages)
    assert found["nodes"] > 1000 and found["committed"]
