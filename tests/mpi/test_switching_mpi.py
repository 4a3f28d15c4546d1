"""Switching between ranks that are processes: one world, all 12 pairs, the tokens of a run that never switches."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from splash_trt.request import FinishReason
from tests.mpi.switching_cases import switch_often, tour_under_load
from tests.mpi.world import Ranks
from tests.switching.harness import PAIRS, Told, assert_same, make_requests, never_switched, write_model

pytestmark = pytest.mark.mpi

REQUESTS = 40


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return never_switched(folder, make_requests(REQUESTS))


@pytest.mark.parametrize("plans_in_flight", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_tour_of_all_pairs_under_load(mpi4: Ranks, expected: dict[str, Told], plans_in_flight: int) -> None:
    requests = [msgspec.to_builtins(request) for request in make_requests(REQUESTS)]
    config = {"plans_in_flight": plans_in_flight, "migration_bytes": 30000, "migration_max_slowdown": 1000.0}
    found = mpi4.run(tour_under_load, requests, config, timeout_s=240)[0]
    records = found["records"]
    assert {tuple(record["pair"]) for record in records} == {(a.name.lower(), b.name.lower()) for a, b in PAIRS}
    assert {record["outcome"] for record in records} == {"committed"}
    assert all(record["living"] > 0 for record in records), "the load ended before the tour"
    told = {key: Told(tokens, logprobs, FinishReason.LENGTH) for key, (tokens, logprobs) in found["told"].items()}
    assert len(told) == REQUESTS
    assert_same(told, expected)


def test_switching_over_and_over_makes_no_communicator_and_no_thread(mpi2: Ranks) -> None:
    check_leaks(mpi2, 36)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_switches_make_no_communicator_and_no_thread(mpi2: Ranks) -> None:
    check_leaks(mpi2, 1000)


def check_leaks(ranks: Ranks, switches: int) -> None:
    ranks.run(switch_often, 12, timeout_s=240)  # a warm-up
    found = ranks.run(switch_often, switches, timeout_s=1500)
    assert found[0]["outcomes"] == ["committed"]
    for rank, changes in enumerate(found):
        for name in ("communicators", "threads"):
            before, after = changes[name]
            assert after == before, f"rank {rank}: {name} went from {before} to {after}"
