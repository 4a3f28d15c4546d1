"""Switching over and over under load leaves nothing behind: no page, no memory, no thread."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from statistics import median

import psutil  # type: ignore[import-untyped]
import pytest

from splash_trt.request import Request, SamplingParams
from tests.switching.harness import LAYOUTS, TOUR, Server

RANKS = 2
WINDOW = 10  # switches
RUNNING = 3


class Load:
    """Keeps a few requests running; they come, end and are followed by others for ever."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._count = 0

    def step(self) -> None:
        server = self._server
        while server.scheduler.num_running + server.scheduler.num_waiting < RUNNING:
            self._count += 1
            prompt = tuple((7 * self._count + i) % 256 for i in range(3 + 5 * (self._count % 4)))
            sampling = SamplingParams(max_tokens=8 + self._count % 5, temperature=0.0, ignore_eos=True)
            server.add(Request(id=f"load{self._count:06d}", prompt=prompt, sampling=sampling))
        server.step()


def switch_often(folder: Path, switches: int) -> tuple[list[int], list[int]]:
    """(resident bytes, threads) after each of the switches, each of which is committed under load."""
    process = psutil.Process()
    resident, threads = [], []
    with Server(folder, ranks=RANKS, layout=TOUR[0], pages=40, migration_bytes=100000) as server:
        load = Load(server)
        targets = itertools.islice(itertools.cycle(TOUR[1:]), switches)
        for number, target in enumerate(targets):
            server.scheduler.switch(target, "test")
            load.step()
            while server.scheduler.switcher.busy:
                load.step()
            assert server.records[-1].outcome == "committed", (number, server.records[-1])
            server.plans.clear()
            for request_id in [request_id for request_id, told in server.told.items() if told.finish]:
                del server.told[request_id]
            if number % WINDOW == 0:
                gc.collect()
            resident.append(process.memory_info().rss)
            threads.append(threading.active_count())
        for request_id in server.told:
            server.cancel(request_id)
        server.run()  # checks that every page has come back
        assert server.scheduler.switcher.epoch == switches
        for rank in range(RANKS):
            runner = server.runner(rank)
            assert (runner.weights.residency.value == "full") == (LAYOUTS[server.scheduler.layout].name in ("DP", "CP"))
    return resident, threads


def assert_flat(resident: list[int], threads: list[int]) -> None:
    """The last windows are as large as the first ones after a warm-up, by their medians."""
    assert len(set(threads)) == 1, f"threads came or went: {sorted(set(threads))}"
    windows = [median(resident[i : i + WINDOW]) for i in range(0, len(resident), WINDOW)]
    warm = windows[len(windows) // 4 :]
    growth = median(warm[-2:]) / median(warm[:2]) - 1
    assert abs(growth) < 0.01, f"resident memory changed by {growth:.2%}: {[int(w) >> 10 for w in windows]} KiB"


def test_a_hundred_switches_leave_nothing_behind(folder: Path) -> None:
    assert_flat(*switch_often(folder, 100))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_switches_leave_nothing_behind(folder: Path) -> None:
    assert_flat(*switch_often(folder, 1000))
