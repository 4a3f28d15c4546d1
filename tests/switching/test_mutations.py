"""The proofs can fail: with a fault planted in what moves things by collectives, a tour of switches is noticed to go
wrong. What does not depend on who moves them has its faults in test_program_mutations.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from splash_trt.migration.mover import Mover
from splash_trt.request import Request
from tests.switching.harness import TOUR, Server, Told, assert_same, noticed


def tour(folder: Path, requests: list[Request], expected: dict[str, Told]) -> Server:
    """All 12 switches on 2 ranks, with requests that arrive and end meanwhile, or as many as it takes to notice that
    something is wrong."""
    with Server(folder, ranks=2, layout=TOUR[0], pages=60, migration_bytes=30000) as server:
        for number, target in enumerate(TOUR[1:]):
            server.add(*requests[2 * number : 2 * number + 2])
            server.switch(target)
            if noticed(server.told, expected):
                return server
        server.run()
    return server


def a_row_is_left_out(scatter: Callable[..., None]) -> Callable[..., None]:
    def scattered(self: Mover, moves: np.ndarray, weights: np.ndarray, source: int, numbers: Any) -> None:
        pages = self._storage.pages.clone()
        scatter(self, moves, weights, source, numbers)
        for _, _, target, page, first, count in moves[:1].tolist():
            if target == self._comm.rank and count > 1:
                self._storage.pages[page, :, first] = pages[page, :, first]

    return scattered


def no_new_row_travels(after: Callable[..., str]) -> Callable[..., str]:
    return lambda self, plan: ""


def one_head_stays_behind(gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(self: Mover, moves: np.ndarray, weights: np.ndarray, target: int, kind: str) -> Any:
        out = gather(self, moves, weights, target, kind)
        if len(weights) and len(out):
            out = out.clone()
            out[-1] = 0
        return out

    return gathered


FAULTS = [
    pytest.param(Mover, "_scatter", a_row_is_left_out, id="a row that came in is not stored"),
    pytest.param(Mover, "after", no_new_row_travels, id="new rows stay where they were computed"),
    pytest.param(Mover, "_gather", one_head_stays_behind, id="a number of a head is lost"),
]


def test_a_tour_without_a_fault(folder: Path, requests: list[Request], expected: dict[str, Told]) -> None:
    server = tour(folder, requests, expected)
    assert [record.outcome for record in server.records] == ["committed"] * 12
    assert_same(server.told, expected)


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS)
def test_a_planted_fault_is_noticed(
    folder: Path, requests: list[Request], expected: dict[str, Told], owner: Any, name: str, fault: Any
) -> None:
    with patch.object(owner, name, fault(getattr(owner, name))):
        server = tour(folder, requests, expected)
    assert noticed(server.told, expected)


def test_heads_that_never_come_are_noticed(
    folder: Path, requests: list[Request], expected: dict[str, Told]
) -> None:
    """The bytes of heads are cache rows until a switch fills them: to trust the residency alone would not do."""
    with patch.object(Mover, "_scatter", lambda *_: None):
        server = tour(folder, requests, expected)
    assert noticed(server.told, expected)
