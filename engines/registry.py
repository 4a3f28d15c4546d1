"""Decides which implementation of an operation is used for a shape on this device: the fastest of those that are right.

An operation has candidates: torch, our Triton kernels, TensorRT-LLM's operators. A candidate is used for a shape only
after it has agreed with the plain reference on fresh random inputs, on this device, in this process; among those that
have, the fastest is used. Where ranks decide together, a candidate has to be right on all of them, and its time is that
of the slowest rank. If only our own candidate is made for a shape, it is used without a test. The verdict on each
candidate is kept and can be shown (`splash-trt inspect --ops`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splash_engines.timing import Timer, captured_seconds, cpu_seconds, gpu_seconds

Function = Callable[..., Any]
Dims = Mapping[str, int]
Gather = Callable[[dict[str, Any]], Sequence[dict[str, Any]]]
"""Takes this rank's text or numbers by name, and returns those of all ranks, in rank order, on each of them."""

CHECKS = 2  # rounds of fresh inputs that a candidate has to get right
COLD_BYTES = 128 << 20  # size of all inputs of timed calls: more than a GPU's L2 holds, as with a step's weights
MOST_INPUTS = 16
GUARD_BYTES = 1 << 20  # guarded bytes before and after each tensor that a candidate gets
GUARD = 0xA5
CHANGED = 1e-2  # the relative error allowed in an argument that is changed in place
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
    """The shape, dtype and device that a choice is for. dims: sizes by name, such as {"tokens": 8, "hidden": 2048}."""

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
    """Returns the function, which takes the reference's arguments, or the reason why there is none here."""
    unfit: Callable[[Case], str | None] = any_case
    """Returns the reason why it is not for this case; None: it is. This may depend on sizes and dtype only, so that it
    is the same on all ranks."""
    trusted: bool = False
    """Used without a test if it is the only candidate that can be used."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    name: str
    meaning: str
    """One line for a reader of the list."""
    reference: Function
    inputs: Callable[[Case, torch.Generator], Sequence[Any]]
    """Fresh random arguments on the case's device, by a generator of that device."""
    disagreement: Callable[[Any, Any], str | None]
    """Takes the reference's result and a candidate's. Returns how they differ by more than is allowed; None: they
    agree."""
    candidates: tuple[Candidate, ...]
    filled: int = 0
    """This many of the last arguments are the result, which the function fills; 0: it returns its result. Of the other
    arguments, a candidate may change only those that the reference changes too, and in the same way."""
    captured: bool = False
    """On a GPU it is called in CUDA graphs, so a candidate that cannot be captured cannot be used."""


@dataclass(frozen=True)
class Finding:
    candidate: str
    verdict: Verdict
    reason: str
    """Empty if the verdict says everything."""
    microseconds: float | None = None
    """The time of one call; None if it was not timed."""


@dataclass(frozen=True)
class Choice:
    operation: str
    function: Function
    findings: tuple[Finding, ...]

    @property
    def used(self) -> str:
        return next(f.candidate for f in self.findings if f.verdict is Verdict.USED)


class Registry:
    """The choices on one device. Each is made when it is first asked for, and kept."""

    def __init__(
        self,
        operations: Sequence[Operation],
        device: torch.device,
        timer: Timer | None = None,
        gather: Gather | None = None,
    ) -> None:
        """gather: for ranks that decide together. All of them have to ask for the same choices in the same order."""
        self.operations = {operation.name: operation for operation in operations}
        self._device = device
        self._timer = timer or (gpu_seconds if device.type == "cuda" else cpu_seconds)
        self._gather = gather or (lambda told: [told])
        self._choices: dict[tuple[object, ...], Choice] = {}

    def choose(self, name: str, dims: Dims, dtype: torch.dtype) -> Choice:
        """The choice for this shape. RuntimeError if no candidate is right, not even our own."""
        key = (name, tuple(sorted(dims.items())), dtype)
        if key not in self._choices:
            case = Case(dims=dims, dtype=dtype, device=self._device)
            self._choices[key] = self._decide(self.operations[name], case)
        return self._choices[key]

    def _decide(self, operation: Operation, case: Case) -> Choice:
        findings: dict[str, Finding] = {}
        fit: list[Candidate] = []
        for candidate in operation.candidates:
            unfit = candidate.unfit(case)
            if unfit is None:
                fit.append(candidate)
            else:
                findings[candidate.name] = Finding(candidate.name, Verdict.UNFIT, unfit)
        usable = self._loaded(fit, findings)
        times: dict[str, float] = {}
        trusted = [c.name for c in fit if c.trusted]
        if list(usable) == trusted and len(trusted) == 1:
            (best,) = usable
            findings[best] = Finding(best, Verdict.USED, "")
        else:
            times = self._measured(operation, case, usable, findings)
            best = min(times, key=lambda name: times[name], default="")
        in_order = tuple(_judge(findings.get(c.name), c.name, best, times) for c in operation.candidates)
        if not best:
            said = "; ".join(f"{f.candidate}: {f.verdict.value}, {f.reason}" for f in in_order)
            raise RuntimeError(f"{operation.name} {dict(case.dims)}: no candidate can be used: {said}")
        return Choice(operation.name, usable[best], in_order)

    def _loaded(self, fit: Sequence[Candidate], findings: dict[str, Finding]) -> dict[str, Function]:
        """The functions that every rank has, by candidate; notes in `findings` which are absent."""
        found = {candidate.name: _load(candidate) for candidate in fit}
        absent = {name: why for name, why in found.items() if isinstance(why, str)}
        if not (len(fit) == 1 and fit[0].trusted):
            absent = self._reasons(absent)
        findings |= {name: Finding(name, Verdict.ABSENT, why) for name, why in absent.items()}
        return {name: f for name, f in found.items() if name not in absent and not isinstance(f, str)}

    def _measured(
        self, operation: Operation, case: Case, usable: Mapping[str, Function], findings: dict[str, Finding]
    ) -> dict[str, float]:
        """The time in seconds of each candidate that is right on every rank; notes in `findings` which are wrong.

        All are checked before any is timed, since timed calls may change their inputs.
        """
        generator = torch.Generator(device=case.device)
        rounds = [operation.inputs(case, generator.manual_seed(seed)) for seed in range(CHECKS)]
        expected = [_called(operation, operation.reference, arguments) for arguments in rounds]
        turns = self._turns(operation, case, rounds) if usable else rounds
        defects = {name: _defect(operation, function, rounds, expected) for name, function in usable.items()}
        wrong = self._reasons({name: why for name, why in defects.items() if why is not None})
        right = [name for name in usable if name not in wrong]
        everywhere = self._gather({name: self._time(operation, usable[name], turns) for name in right})
        wrong |= _united([{name: t for name, t in told.items() if isinstance(t, str)} for told in everywhere])
        findings |= {name: Finding(name, Verdict.WRONG, why) for name, why in wrong.items()}
        return {name: max(told[name] for told in everywhere) for name in right if name not in wrong}

    def _turns(self, operation: Operation, case: Case, rounds: list[Sequence[Any]]) -> list[Sequence[Any]]:
        """Inputs for timed calls, to be taken in turn. On a GPU there are so many that a call's inputs have left the
        cache before they are used again."""
        if case.device.type != "cuda":
            return rounds[:1]
        size = sum(a.nbytes for a in rounds[0] if isinstance(a, torch.Tensor))
        count = min(MOST_INPUTS, -(-COLD_BYTES // max(1, size)))
        generator = torch.Generator(device=case.device)
        more = [operation.inputs(case, generator.manual_seed(seed)) for seed in range(CHECKS, count)]
        return [*rounds, *more][:count]

    def _time(self, operation: Operation, function: Function, turns: Sequence[Sequence[Any]]) -> float | str:
        """The seconds that a call takes, or how it failed."""
        turn = itertools.cycle(turns)
        timer = captured_seconds if operation.captured and self._timer is gpu_seconds else self._timer
        try:
            return timer(lambda: function(*next(turn)))
        except Exception as error:  # as in _defect
            return _failure(error)

    def _reasons(self, mine: dict[str, str]) -> dict[str, str]:
        """All ranks' reasons against candidates, from this rank's."""
        return _united(self._gather(mine))


def _united(everywhere: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """All ranks' reasons against candidates, by name. A reason names its rank, unless all ranks gave the same."""
    found: dict[str, str] = {}
    for rank, told in enumerate(everywhere):
        for name, why in told.items():
            common = all(other.get(name) == why for other in everywhere)
            found.setdefault(name, why if common else f"rank {rank}: {why}")
    return found


def _load(candidate: Candidate) -> Function | str:
    try:
        return candidate.load()
    except Exception as error:  # as in _defect
        return f"it does not load: {one_line(error)}"


def one_line(error: Exception) -> str:
    """An error's message on one line, at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _failure(error: Exception) -> str:
    return f"it failed: {one_line(error)}"


def _judge(finding: Finding | None, name: str, best: str, times: Mapping[str, float]) -> Finding:
    if finding is not None:
        return finding
    microseconds = times[name] * MICROSECONDS
    if name == best:
        return Finding(name, Verdict.USED, "", microseconds)
    return Finding(name, Verdict.SLOWER, f"{times[name] / times[best]:.2f} times as long", microseconds)


@dataclass(frozen=True)
class _Call:
    """A call's result, and its other arguments as they are after the call."""

    result: Any
    others: Sequence[Any]


def _defect(
    operation: Operation, function: Function, rounds: Sequence[Sequence[Any]], expected: Sequence[_Call]
) -> str | None:
    """How a function disagrees with the reference in the first round in which it does; None: in none."""
    for arguments, right in zip(rounds, expected, strict=True):
        try:
            call = _called(operation, function, arguments)
            wrong = operation.disagreement(right.result, call.result) or _harm(arguments, right.others, call.others)
        except Exception as error:  # others' code may raise anything, and this rank has to go on with the other ranks
            wrong = _failure(error)
        if wrong is not None:
            return wrong
    return None


def _called(operation: Operation, function: Function, arguments: Sequence[Any]) -> _Call:
    """Calls a function with copies of the arguments. The result is one tensor if it fills one, a tuple if it fills
    several. RuntimeError if it writes outside of its arguments."""
    guards: list[torch.Tensor] = []
    own = [_guarded(a, guards) if isinstance(a, torch.Tensor) else a for a in arguments]
    returned = function(*own)
    if any(bool((guard != GUARD).any()) for guard in guards):
        raise RuntimeError("it wrote outside of its arguments")
    if not operation.filled:
        return _Call(returned, own)
    filled = own[-operation.filled :]
    return _Call(filled[0] if operation.filled == 1 else tuple(filled), own[: -operation.filled])


def _guarded(a: torch.Tensor, guards: list[torch.Tensor]) -> torch.Tensor:
    """A copy of a tensor with guard bytes before and after it, which are added to `guards`."""
    around = torch.full((2 * GUARD_BYTES + a.nbytes,), GUARD, dtype=torch.uint8, device=a.device)
    before, inside, behind = around.split((GUARD_BYTES, a.nbytes, GUARD_BYTES))
    guards += [before, behind]
    return inside.view(a.dtype).view(a.shape).copy_(a)


def _harm(before: Sequence[Any], right: Sequence[Any], got: Sequence[Any]) -> str | None:
    """What a call did wrong to arguments that are not its result; None: it did what the reference did."""
    for index, (old, want, new) in enumerate(zip(before, right, got, strict=False)):
        if isinstance(old, torch.Tensor):
            if _same(old, want):
                if not _same(old, new):
                    return f"it changed argument {index}, which is for reading"
            elif (wrong := relative_error(CHANGED)(want, new)) is not None:
                return f"argument {index}, which it is to change: {wrong}"
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def relative_error(limit: float) -> Callable[[Any, Any], str | None]:
    """A disagreement function: tensors agree if shapes and dtypes are equal and the norm of their difference is at most
    `limit` times the reference's norm."""

    def disagreement(expected: torch.Tensor, got: torch.Tensor) -> str | None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
        want = expected.double()
        error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
        return None if error <= limit else f"relative error {error:.1e}, more than {limit:.0e}"

    return disagreement
