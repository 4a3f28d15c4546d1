"""Candidates that do other things wrong than their result: they are not used, do no harm to others, and do not end the
process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from splash_engines.registry import Candidate, Finding, Function, Operation, Registry, Verdict, relative_error
from splash_engines.timing import cpu_seconds
from tests.unit.test_registry import CPU, Watch, candidate, choose, fills, operation, reference


def test_one_that_changes_what_it_is_to_read_is_not_used() -> None:
    """A step's weights among it, which the next step needs as they were."""

    def greedy(x: torch.Tensor) -> torch.Tensor:
        x += x
        return x

    choice = choose(Watch(reference=2e-6), candidate(greedy), candidate(reference))
    assert choice.findings[0] == Finding("greedy", Verdict.WRONG, "it changed argument 0, which is for reading")
    assert choice.used == "reference"


def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y
    return x * 2


ADDS = Operation(
    name="double", meaning="", reference=adds, disagreement=relative_error(1e-6),
    inputs=lambda case, g: (torch.randn(3, generator=g), torch.randn(3, generator=g)), candidates=(),
)  # fmt: skip


def test_one_that_does_not_change_what_it_should_is_not_used() -> None:
    def forgets(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * 2

    both = dataclasses.replace(ADDS, candidates=(candidate(forgets), candidate(adds)))
    choice = Registry([both], CPU, Watch(adds=1.0)).choose("double", {}, torch.float32)
    assert choice.used == "adds" and choice.findings[0].reason.startswith("argument 0, which it is to change: relative")


def test_calls_that_are_timed_change_nothing_that_others_are_checked_with() -> None:
    def again(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return adds(x, y)

    both = dataclasses.replace(ADDS, candidates=(candidate(again), candidate(adds)))
    choice = Registry([both], CPU, cpu_seconds).choose("double", {}, torch.float32)
    assert {f.verdict for f in choice.findings} == {Verdict.USED, Verdict.SLOWER}


@pytest.mark.parametrize("rows", [-1, 3])
def test_one_that_writes_outside_of_its_arguments_is_not_used(rows: int) -> None:
    """A row before the first, or after the last: where a larger step's results would be."""

    def wide(x: torch.Tensor, out: torch.Tensor) -> None:
        fills(x, out)
        torch.as_strided(out, (5,), (1,), out.storage_offset() + 5 * rows).fill_(7.0)

    into = Operation(
        name="double", meaning="", reference=fills, disagreement=relative_error(1e-6), filled=1,
        inputs=lambda case, g: (torch.randn((3, 5), generator=g), torch.full((3, 5), torch.nan)),
        candidates=(candidate(wide), candidate(fills)),
    )  # fmt: skip
    choice = Registry([into], CPU, Watch(fills=1.0)).choose("double", {}, torch.float32)
    assert choice.used == "fills" and choice.findings[0].reason == "it failed: it wrote outside of its arguments"


@pytest.mark.parametrize("error", [TypeError("takes 4 arguments"), KeyError(), AssertionError(), OSError("no library")])
def test_one_that_raises_whatever_it_likes_is_not_used(error: Exception) -> None:
    """Where ranks decide together, one that died here would leave the others waiting."""

    def raising(x: torch.Tensor) -> torch.Tensor:
        raise error

    def unloadable() -> Function | str:
        raise error

    def late(call: Callable[[], Any]) -> float:
        call()
        return 1.0

    used: list[torch.Tensor] = []

    def tired(x: torch.Tensor) -> torch.Tensor:
        used.append(x)
        if len(used) > 2:  # the calls that check it
            raise error
        return x * 2

    known = [candidate(raising), Candidate(name="unloadable", load=unloadable), candidate(tired), candidate(reference)]
    choice = Registry([operation(*known)], CPU, late).choose("double", {"tokens": 3}, torch.float32)
    said = " ".join(str(error).split()) or type(error).__name__
    assert [(f.verdict, f.reason) for f in choice.findings] == [
        (Verdict.WRONG, f"it failed: {said}"),
        (Verdict.ABSENT, f"it does not load: {said}"),
        (Verdict.WRONG, f"it failed: {said}"),
        (Verdict.USED, ""),
    ]


def test_one_that_gives_nothing_is_not_used() -> None:
    def nothing(x: torch.Tensor) -> None:
        return None

    choice = choose(Watch(reference=1.0), candidate(nothing), candidate(reference))
    assert choice.findings[0].verdict is Verdict.WRONG and choice.used == "reference"
