"""Pages moved on real ranks in the middle of generation: the same tokens, and nothing left above the limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splash_trt.llm import LLM
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Request, SamplingParams
from tests.oracles.checked_scheduler import compact_pages
from tests.oracles.simulated_ranks import Outputs
from tests.oracles.tiny_models import make_model

PAGE = 4  # tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("v3_base", tmp_path_factory.mktemp("model"))


def _requests() -> list[Request]:
    """The first four end early: the low pages of every rank come free while the others go on."""
    return [
        Request(
            id=f"r{i}",
            prompt=tuple((3 * i + 7 * j) % 250 for j in range(9 + i)),
            sampling=SamplingParams(max_tokens=3 if i < 4 else 24, seed=i, ignore_eos=True),
        )
        for i in range(8)
    ]


def _run(
    folder: Path, layout: str, ranks: int, plans_in_flight: int, between: Callable[[Orchestrator], None]
) -> Outputs:
    """All requests at once; `between` is called before each step."""
    with LLM(
        folder,
        layout=layout,
        ranks=ranks,
        dtype="float64",
        page_tokens=PAGE,
        memory_bytes=4 << 20,
        context_block_tokens=16,
        max_running=8,
        plans_in_flight=plans_in_flight,
    ) as llm:
        engine = llm.orchestrator
        assert engine is not None
        outputs = Outputs()
        for request in _requests():
            engine.add(request)
        for _ in range(500):
            if engine.idle:
                engine.scheduler.check_idle()
                return outputs
            between(engine)
            outputs.take(engine.step())
    raise AssertionError("not idle after 500 steps")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Outputs:
    """Of one rank: in float64 it is what every layout gives."""
    return _run(folder, "tp", 1, 1, lambda engine: None)


def _above(engine: Orchestrator, rank: int, limit: int) -> int:
    """Live pages of a rank at or above `limit`."""
    directory = engine.scheduler.directory
    return sum(int((directory[name].table[:, rank] >= limit).sum()) for name in directory)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize(("layout", "ranks"), [("tp", 2), ("dp", 2), ("cp", 3), ("dop", 2), ("tp", 1)])
def test_compaction_in_mid_generation_changes_no_token(
    folder: Path, undisturbed: Outputs, layout: str, ranks: int, plans_in_flight: int
) -> None:
    moved = [0] * ranks
    calls = 0

    def compact(engine: Orchestrator) -> None:
        """From the tenth step on, when the short requests have ended: the live pages fit below the limit."""
        nonlocal calls
        calls += 1
        if calls < 10 or engine.scheduler.num_running == 0:
            return
        for rank in range(ranks):
            table = [engine.scheduler.directory[name].table[:, rank] for name in engine.scheduler.directory]
            limit = sum(int((column >= 0).sum()) for column in table)
            before = _above(engine, rank, limit)
            found = compact_pages(engine.scheduler, rank, limit, budget_pages=2)
            assert found <= 2 and _above(engine, rank, limit) == before - found
            moved[rank] += found

    disturbed = _run(folder, layout, ranks, plans_in_flight, compact)
    assert sum(moved) > 3 and (layout != "tp" or min(moved) > 3), moved
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.finish == undisturbed.finish


@pytest.mark.parametrize(("layout", "ranks", "limit"), [("tp", 2, 26), ("cp", 3, 8), ("dop", 2, 12)])
def test_a_fallen_limit_is_kept_from_then_on(
    folder: Path, undisturbed: Outputs, layout: str, ranks: int, limit: int
) -> None:
    """As a switch to FULL residency does it: the limit falls, pages leave the top, none comes back there."""
    cleared: list[int] = []
    calls = 0

    def clear(engine: Orchestrator) -> None:
        nonlocal calls
        calls += 1
        scheduler = engine.scheduler
        if calls == 7:
            for pool in scheduler.directory.pools:
                pool.set_limit(limit)
        if calls >= 7:
            for rank in range(ranks):
                compact_pages(scheduler, rank, limit, budget_pages=1)
            above = sum(_above(engine, rank, limit) for rank in range(ranks))
            assert not cleared or above <= cleared[-1]
            cleared.append(above)

    disturbed = _run(folder, layout, ranks, 2, clear)
    assert cleared[0] > 0 == cleared[-1]
    assert disturbed.tokens == undisturbed.tokens


def test_a_plan_with_copies_and_no_rows_runs(folder: Path) -> None:
    """All requests are cancelled between the decision to copy and the next plan: it goes out all the same."""
    with LLM(folder, layout="dop", ranks=2, dtype="float64", page_tokens=PAGE, memory_bytes=4 << 20) as llm:
        engine = llm.orchestrator
        assert engine is not None
        requests = [_requests()[i] for i in (0, 1, 4, 5)]
        for request in requests:
            engine.add(request)
        outputs = Outputs()
        while len(outputs.finish) < 2:
            outputs.take(engine.step())
        for _ in range(2):
            engine.step()
        moved = sum(compact_pages(engine.scheduler, rank, limit=4, budget_pages=9) for rank in range(2))
        for request in requests:
            engine.cancel(request.id)
        for _ in range(4):
            engine.step()
        assert moved > 0 and engine.idle
        engine.scheduler.check_idle()
        outputs = Outputs()
        engine.add(requests[-1])
        while not engine.idle:
            outputs.take(engine.step())
        assert len(outputs.tokens["r5"]) == 24
