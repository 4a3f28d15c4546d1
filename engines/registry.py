"""Which implementation of an operation is used for a shape on this device: the fastest of those that are right here.

An operation has candidates: torch, our Triton kernels, TensorRT-LLM's operators. A candidate is used for a shape only
after it agreed with the plain reference on fresh random inputs, on this device, in this process; among those that did,
the one that took the least time. Where the reference is the only one, nothing is run. What became of each candidate is
kept and can be read (`splash-trt inspect --ops`).
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]
Dims = Mapping[str, int]
Timer = Callable[[Callable[[], Any]], float]

CHECKS = 2  # rounds of fresh inputs that a candidate has to get right
MICROSECONDS = 1e6


class Verdict(enum.Enum):
    USED = "used"
    SLOWER = "slower"
    WRONG = "wrong"
    """It failed, or disagreed with the reference."""
    UNFIT = "unfit"
    """Not made for this shape or dtype."""
    ABSENT = "absent"
    """It cannot be loaded here."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an operation is asked for. dims: its sizes by name, such as {"tokens": 8, "hidden": 2048}."""

    dims: Dims
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, name: str) -> int:
        return self.dims[name]


def any_case(case: Case) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    name: str
    """Origin and function, such as "trtllm.dsv3_fused_a_gemm_op"."""
    load: Callable[[], Function | str]
    """The function, which takes what the reference takes; or why there is none here."""
    unfit: Callable[[Case], str | None] = any_case
    """Why it does not do this case; None: it does."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    name: str
    meaning: str
    """One line for a reader of the list."""
    reference: Function
    inputs: Callable[[Case, torch.Generator], Sequence[Any]]
    """Fresh random arguments on the case's device, by a generator of that device."""
    disagreement: Callable[[Any, Any], str | None]
    """(the reference's result, a candidate's) to how they differ by more than they may; None: they agree."""
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Finding:
    candidate: str
    verdict: Verdict
    reason: str
    """Empty where the verdict says it all."""
    microseconds: float | None = None
    """Of one call, where it agreed with the reference."""


@dataclass(frozen=True)
class Choice:
    operation: str
    function: Function
    findings: tuple[Finding, ...]

    @property
    def used(self) -> str:
        return next(f.candidate for f in self.findings if f.verdict is Verdict.USED)


class Registry:
    """The operations' choices on one device, each made when it is asked for first, and kept."""

    def __init__(self, operations: Sequence[Operation], device: torch.device, timer: Timer | None = None) -> None:
        self.operations = {operation.name: operation for operation in operations}
        self._device = device
        self._timer = timer or (gpu_seconds if device.type == "cuda" else cpu_seconds)
        self._choices: dict[tuple[object, ...], Choice] = {}

    def choose(self, name: str, dims: Dims, dtype: torch.dtype) -> Choice:
        """The choice for this shape. RuntimeError if no candidate is right, the reference's own form included."""
        key = (name, tuple(sorted(dims.items())), dtype)
        if key not in self._choices:
            case = Case(dims=dims, dtype=dtype, device=self._device)
            self._choices[key] = self._decide(self.operations[name], case)
        return self._choices[key]

    def _decide(self, operation: Operation, case: Case) -> Choice:
        findings: dict[str, Finding] = {}
        usable: dict[str, Function] = {}
        for candidate in operation.candidates:
            function = candidate.load()
            if isinstance(function, str):
                findings[candidate.name] = Finding(candidate.name, Verdict.ABSENT, function)
            elif (unfit := candidate.unfit(case)) is not None:
                findings[candidate.name] = Finding(candidate.name, Verdict.UNFIT, unfit)
            else:
                usable[candidate.name] = function
        if list(usable.values()) != [operation.reference]:
            findings |= {name: self._measure(operation, name, usable[name], case) for name in usable}
        times = {f.candidate: f.microseconds for f in findings.values() if f.microseconds is not None}
        right = [name for name in usable if name in times or name not in findings]
        in_order = [findings.get(c.name, Finding(c.name, Verdict.USED, "")) for c in operation.candidates]
        if not right:
            said = "; ".join(f"{f.candidate}: {f.verdict.value}, {f.reason}" for f in in_order)
            raise RuntimeError(f"{operation.name} {dict(case.dims)}: no candidate can be used: {said}")
        best = min(right, key=lambda name: times.get(name, 0.0))
        return Choice(operation.name, usable[best], tuple(_judge(f, best, times) for f in in_order))

    def _measure(self, operation: Operation, name: str, function: Function, case: Case) -> Finding:
        """Hold a candidate against the reference, then take its time."""
        generator = torch.Generator(device=case.device)
        for seed in range(CHECKS):
            arguments = operation.inputs(case, generator.manual_seed(seed))
            expected = operation.reference(*_copies(arguments))
            try:
                wrong = operation.disagreement(expected, function(*_copies(arguments)))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                wrong = f"it failed: {' '.join(str(error).split())[:200]}"
            if wrong is not None:
                return Finding(name, Verdict.WRONG, wrong)
        seconds = self._timer(lambda: function(*arguments))
        return Finding(name, Verdict.SLOWER, "", seconds * MICROSECONDS)


def _judge(finding: Finding, best: str, times: Mapping[str, float]) -> Finding:
    if finding.candidate == best:
        return Finding(best, Verdict.USED, finding.reason, finding.microseconds)
    if finding.microseconds is None:
        return finding
    longer = finding.microseconds / times[best]
    return Finding(finding.candidate, Verdict.SLOWER, f"{longer:.2f} times as long", finding.microseconds)


def _copies(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of their own for each call: some operations write into theirs."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


def relative_error(limit: float) -> Callable[[Any, Any], str | None]:
    """Tensors agree if their difference's norm is at most `limit` of the reference's norm, and shapes are the same."""

    def disagreement(expected: torch.Tensor, got: torch.Tensor) -> str | None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
        want = expected.double()
        error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
        return None if error <= limit else f"relative error {error:.1e}, more than {limit:.0e}"

    return disagreement


def cpu_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median of `repeats` calls after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def gpu_seconds(call: Callable[[], Any], repeats: int = 7, calls: int = 20) -> float:
    """Median over replays of a CUDA graph of `calls` calls, a call; of plain launches where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        run = _captured(call, calls, stream)
        taken = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3 / calls)
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(taken[1:])


def _captured(call: Callable[[], Any], calls: int, stream: torch.cuda.Stream) -> Callable[[], Any]:
    def plain() -> None:
        for _ in range(calls):
            call()

    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream):
            plain()
    except RuntimeError:
        return plain  # it waits for the device or allocates by itself
    return graph.replay
