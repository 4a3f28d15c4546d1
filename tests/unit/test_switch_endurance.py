"""Many switches under load on one scheduler: nothing leaks, on rank 0 or on the ranks."""

from __future__ import annotations

import random
import sys

import pytest

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS
from splash_trt.request import Request
from splash_trt.scheduler.switcher import KEPT_RECORDS
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens


def deep_size(root: object) -> int:
    """Bytes of everything that can be reached from `root`'s attributes and containers."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)) or type(item).__name__ == "deque":
            waiting += list(item)
        elif hasattr(item, "__dict__"):
            waiting.append(vars(item))
    return total


def switch_often(count: int, seed: int) -> None:
    rng = random.Random(seed)
    c = CheckedScheduler(
        (40, 36, 44),
        full_pages=(30, 36, 28),
        heads=(2, 1, 2),
        layouts=tuple(Layout),
        migration_bytes=2000,
        max_running=10,
        switch_hold_s=0.0,
    )
    directory = c.scheduler.directory
    requests: dict[str, Request] = {}
    sizes: list[int] = []
    for turn in range(count):
        while c.scheduler.num_running + c.scheduler.num_waiting < 8:
            r = request(f"r{turn}-{len(requests)}", rng.randrange(1, 20), rng.randrange(1, 25))
            requests[r.id] = r
            c.add(r)
        c.scheduler.switch(rng.choice([layout for layout in Layout if layout is not c.scheduler.layout]), "test")
        if rng.random() < 0.1:
            c.step()
            c.scheduler.abort_switch("test")
        c.settle()
        directory.check()
        assert tuple(directory.limits()) == c.sizes.pages[SPECS[c.scheduler.layout].residency]
        held = sum(len(directory[name].held(rank)) for name in directory for rank in range(3))
        assert held == directory.live_pages().sum(), "pages are held that no request has"
        for name in list(c.outputs.finish):
            assert c.outputs.tokens[name] == expected_tokens(requests.pop(name))
            c.outputs.forget(name)
        c.plans.clear()
        c.traffic.clear()
        sizes.append(deep_size(directory) + deep_size(c.switcher._movement))
    records = c.switcher.records
    assert sum(r.outcome == "committed" for r in records) > min(count, KEPT_RECORDS) / 2
    assert all(r.ended for r in records) and len(records) <= KEPT_RECORDS
    quarter = len(sizes) // 4
    assert max(sizes[-quarter:]) < 1.2 * max(sizes[:quarter]), "rank 0 remembers more and more"
    c.run()
    c.scheduler.check_idle()


def test_a_hundred_switches_under_load() -> None:
    switch_often(100, 1)


@pytest.mark.nightly
def test_a_thousand_switches_under_load() -> None:
    switch_often(1000, 2)
