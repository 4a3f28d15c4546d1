"""What travels between ranks for a switch is exactly what is not already where it must be, for all 12 pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.migration.mover import Mover
from splash_trt.request import Request
from tests.switching.accounting import Rows, row_bytes, weight_bytes
from tests.switching.harness import MODEL, PAIRS, TOUR, Server, Told, assert_same, make_requests

HUGE = 1 << 30
SMALL = 12000  # of 384-byte rows and 10 kB heads: many steps a switch


class Transport:
    """Bytes that ranks have given to the transport for a switch, beside what the movers say that they sent."""

    def __init__(self, server: Server, num_ranks: int) -> None:
        self._server = server
        self._ranks = range(num_ranks)
        self.sent = [0] * num_ranks

    def count(self, exchange: Callable[..., str]) -> Callable[..., str]:
        def counted(mover: Mover, *arguments: Any) -> str:
            comm: Any = mover._comm
            before = comm.bytes_sent["all_to_all"]
            error = exchange(mover, *arguments)
            self.sent[comm.rank] += comm.bytes_sent["all_to_all"] - before
            return error

        return counted

    def kinds(self) -> dict[str, int]:
        """By kind, of all ranks together."""
        movers = [self._server.runner(rank)._mover for rank in self._ranks]
        return {kind: sum(mover.bytes_sent[kind] for mover in movers) for kind in ("weights", "pages", "new_rows")}


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {kind: after[kind] - before[kind] for kind in after}


@pytest.mark.parametrize(
    ("ranks", "budget"),
    [
        (2, SMALL),
        (3, HUGE),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((2, HUGE), (3, SMALL), (4, HUGE), (4, SMALL))),
    ],
)
def test_bytes_are_minimal_on_a_tour_of_all_pairs(folder: Path, ranks: int, budget: int) -> None:
    """Requests prefill, decode and arrive meanwhile. With a budget that takes all at once, no row is late."""
    requests = make_requests(8, max_tokens=900)
    with Server(folder, ranks=ranks, layout=TOUR[0], pages=420, migration_bytes=budget) as server:
        transport = Transport(server, ranks)
        rows, seen, pairs = Rows(server.llm.config), 0, set()
        with patch.object(Mover, "_exchange", transport.count(Mover._exchange)):
            server.add(*requests[:5])
            for number, (source, target) in enumerate(itertools.pairwise(TOUR)):
                for _ in range(3):
                    server.step()
                if number % 4 == 2:
                    server.add(requests[5 + number // 4])  # it prefills while the switch begins
                for plan in server.plans[seen:]:
                    rows.take(plan)
                kinds, sent, seen = transport.kinds(), sum(transport.sent), len(server.plans)
                record = server.switch(target)
                assert record.outcome == "committed", record
                assert (record.source, record.target) == (source.name.lower(), target.name.lower())
                least = minimum(server, rows, seen)
                seen = len(server.plans)
                found = difference(transport.kinds(), kinds)
                assert found["weights"] == weight_bytes(source, target, MODEL, ranks)
                assert (found["pages"] + found["new_rows"]) == least * row_bytes(MODEL), (source, target, found)
                assert sum(transport.sent) - sent == sum(found.values())
                assert record.bytes_between_ranks == found
                if source is Layout.TP or {source, target} == {Layout.DP, Layout.DOP}:
                    assert found["pages"] == found["new_rows"] == 0
                else:
                    assert found["pages"] > 0
                if budget == HUGE:
                    assert rows.late == 0
                pairs.add((source, target))
        assert pairs == set(PAIRS)
        assert all(told.finish is None for told in server.told.values())
        for request_id in server.told:
            server.cancel(request_id)
        server.run()


def minimum(server: Server, rows: Rows, seen: int) -> int:
    """Rows to send for the switch whose first plan is server.plans[seen]; `rows` knows all plans before."""
    live = server.scheduler._ledger.live().tolist()
    epoch = server.plans[seen].epoch
    plans = server.plans[seen:]
    begin = next(i for i, plan in enumerate(plans) if plan.epoch != epoch)
    for plan in plans[:begin]:
        rows.take(plan)
    least = rows.to_send(live)
    for plan in plans[begin:]:
        rows.take(plan)
    return least


@pytest.mark.parametrize("source", [Layout.DP, Layout.DOP])
def test_a_new_owner_gets_one_request_and_nothing_else_moves(
    folder: Path, requests: list[Request], expected: dict[str, Told], source: Layout
) -> None:
    chosen = [r for r in requests if r.sampling.max_tokens == 28][:3]
    with Server(folder, ranks=3, layout=source, pages=60, migration_bytes=HUGE) as server:
        server.add(*chosen)
        for _ in range(5):
            server.step()
        moved = chosen[1]
        old = server.scheduler.directory[moved.id].placement.home
        new = (old + 1) % 3
        server.scheduler.switch(source, "balance", owners={moved.id: new})
        server.step()
        rows = int(server.scheduler._ledger.slots.computed[server.scheduler._ledger.live()][1])
        while server.scheduler.switcher.busy:
            server.step()
        record = server.records[-1]
        assert record.outcome == "committed"
        assert server.scheduler.directory[moved.id].placement.home == new
        assert record.bytes_between_ranks["weights"] == 0
        sent = record.bytes_between_ranks["pages"] // row_bytes(MODEL)
        assert len(moved.prompt) <= sent <= rows
        movers = [server.runner(rank)._mover.bytes_sent for rank in range(3)]
        assert [sum(kinds.values()) > 0 for kinds in movers] == list(np.arange(3) == old)
        server.run()
    assert_same(server.told, expected)
