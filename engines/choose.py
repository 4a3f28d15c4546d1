"""Puts the program's table of kernels together: our own, and others' (TensorRT-LLM's) at sizes at which those are right
and faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splash_engines.kernels import Kernels
from splash_engines.operations_program import OWN
from splash_engines.registry import Choice, Dims, Finding, Function, Registry, Verdict


@dataclass(frozen=True)
class Used:
    """Which candidate is used for an operation at some numbers of rows, and why; as text to be shown."""

    operation: str
    rows: str
    candidate: str
    microseconds: str | None
    """The time of one call; None: nothing was timed."""
    why: str


def choose_kernels(
    kernels: Kernels, registry: Registry, sizes: Mapping[str, Dims], dtype: torch.dtype, rows: Sequence[int]
) -> tuple[Kernels, list[Used]]:
    """Returns the table to use, and what was decided. All ranks call it together if the registry decides for all.

    kernels: our own. sizes: each operation's, without the number of tokens. rows: the numbers of rows that steps are
    padded to, ascending; for other numbers our own kernel is used. RuntimeError if not even ours is right.
    """
    told: list[Used] = []
    for name, dims in sizes.items():
        try:
            choices = {count: registry.choose(name, {"tokens": count, **dims}, dtype) for count in rows}
        except RuntimeError as error:
            raise RuntimeError(f"{error}; --operators own leaves others' out and checks nothing") from error
        others = {count: choice.function for count, choice in choices.items() if choice.used != OWN}
        if others:
            changed: dict[str, Any] = {name: _by_rows(getattr(kernels, name), others)}
            kernels = dataclasses.replace(kernels, **changed)
        told += _told(choices)
    return kernels, told


def _by_rows(own: Function, others: Mapping[int, Function]) -> Function:
    """A function that calls the candidate for the number of rows of its first argument, else our own. Nothing else
    varies: in a model, an operation's weights all have one shape."""

    def call(x: torch.Tensor, *rest: Any) -> Any:
        return others.get(len(x), own)(x, *rest)

    return call


def _told(choices: Mapping[int, Choice]) -> list[Used]:
    groups: list[dict[int, Choice]] = []
    for count, choice in choices.items():
        if groups and _kind(next(iter(groups[-1].values()))) == _kind(choice):
            groups[-1][count] = choice
        else:
            groups.append({count: choice})
    return [_group(group) for group in groups]


def _kind(choice: Choice) -> list[tuple[str, Verdict]]:
    return [(finding.candidate, finding.verdict) for finding in choice.findings]


def _group(group: Mapping[int, Choice]) -> Used:
    """Describes choices, by number of rows, in which each candidate had the same verdict."""
    first = next(iter(group.values()))
    of_all = [list(finding) for finding in zip(*(choice.findings for choice in group.values()), strict=True)]
    used = next(same for same in of_all if same[0].verdict is Verdict.USED)
    others = [_why(same) for same in of_all if same is not used]
    why = "; ".join(others) or "nobody else's is known"
    return Used(first.operation, _span(list(group)), first.used, _microseconds(used), why)


def _why(same: Sequence[Finding]) -> str:
    took, finding = _microseconds(same), same[0]
    if took is not None:
        return f"{finding.candidate} took {took} µs"
    return f"{finding.candidate} is {finding.verdict.value}: {finding.reason}"


def _microseconds(same: Sequence[Finding]) -> str | None:
    times = [finding.microseconds for finding in same if finding.microseconds is not None]
    return _span([round(time, 1) for time in times]) if times else None


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}-{high}"
