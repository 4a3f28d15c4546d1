"""An implementation is used for a shape only if it is right here, and is the fastest of those that are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from splash_engines.operations import (
    DSV3_A_OUT,
    DSV3_HIDDEN,
    Here,
    indexer_topk,
    operations,
    quantize_blocks,
    quantize_rows,
)
from splash_engines.operations_step import step_operations
from splash_engines.registry import (
    Candidate,
    Case,
    Choice,
    Finding,
    Function,
    Operation,
    Registry,
    Verdict,
    relative_error,
)
from splash_engines.timing import cpu_seconds
from splash_engines.trtllm import Trtllm
from splash_plugins.mla_attention.cut import cut

CPU = torch.device("cpu")


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def operation(*candidates: Candidate, of: Function = reference) -> Operation:
    return Operation(
        name="double",
        meaning="twice as much",
        reference=of,
        inputs=lambda case, g: (torch.randn(case["tokens"], generator=g),),
        disagreement=relative_error(1e-4),
        candidates=candidates,
    )


class Watch:
    """A timer by which each function takes what was said of it, as it is told by its first result."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.timed: list[str] = []

    def __call__(self, call: Callable[[], Any]) -> float:
        closure = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))  # type: ignore[attr-defined]
        name = closure["function"].cell_contents.__name__
        self.timed.append(name)
        return self.seconds[name]


def candidate(function: Function, **more: Any) -> Candidate:
    return Candidate(name=function.__name__, load=lambda: function, **more)


def choose(watch: Watch, *candidates: Candidate, tokens: int = 3) -> Choice:
    return Registry([operation(*candidates)], CPU, watch).choose("double", {"tokens": tokens}, torch.float32)


def fast(x: torch.Tensor) -> torch.Tensor:
    return x + x


def wrong(x: torch.Tensor) -> torch.Tensor:
    return x * 2.001


def verdicts(choice: Choice) -> list[tuple[str, Verdict]]:
    return [(f.candidate, f.verdict) for f in choice.findings]


def test_the_fastest_right_one_is_used() -> None:
    watch = Watch(reference=3e-6, fast=1e-6)
    choice = choose(watch, candidate(reference), candidate(fast))
    assert choice.function is fast and choice.used == "fast"
    assert verdicts(choice) == [("reference", Verdict.SLOWER), ("fast", Verdict.USED)]
    assert [f.microseconds for f in choice.findings] == pytest.approx([3.0, 1.0])
    assert choice.findings[0].reason == "3.00 times as long"
    assert choose(Watch(reference=1e-6, fast=2e-6), candidate(reference), candidate(fast)).used == "reference"


def test_a_wrong_one_is_never_timed_and_never_used() -> None:
    watch = Watch(reference=3e-6, wrong=1e-9)
    choice = choose(watch, candidate(wrong), candidate(reference))
    assert choice.used == "reference" and watch.timed == ["reference"]
    assert choice.findings[0].verdict is Verdict.WRONG and "relative error 5.0e-04" in choice.findings[0].reason


def test_one_that_is_right_by_chance_is_found_out() -> None:
    """Every round has fresh numbers: what was learned from one is no help."""
    seen: list[torch.Tensor] = []

    def remembering(x: torch.Tensor) -> torch.Tensor:
        seen.append(x * 2)
        return seen[0]

    choice = choose(Watch(reference=1.0), candidate(remembering), candidate(reference))
    assert choice.findings[0].verdict is Verdict.WRONG


def test_nan_wrong_shapes_and_types_disagree() -> None:
    disagrees = relative_error(1e-3)
    x = torch.randn(4)
    assert disagrees(x, x) is None
    assert disagrees(x, x * torch.nan) is not None
    assert disagrees(x, x[:3]) == "torch.float32 [3] instead of torch.float32 [4]"
    assert disagrees(x, x.double()) is not None
    assert disagrees(torch.zeros(3), torch.zeros(3)) is None


def test_reasons_are_kept() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("NVRTC compilation\n failed")

    few = candidate(fast, unfit=lambda case: f"at most 2 tokens, not {case['tokens']}" if case["tokens"] > 2 else None)
    absent = Candidate(name="absent", load=lambda: "not installed")
    choice = choose(Watch(reference=1.0), few, absent, candidate(failing), candidate(reference))
    assert [(f.verdict, f.reason) for f in choice.findings] == [
        (Verdict.UNFIT, "at most 2 tokens, not 3"),
        (Verdict.ABSENT, "not installed"),
        (Verdict.WRONG, "it failed: NVRTC compilation failed"),
        (Verdict.USED, ""),
    ]
    assert choose(Watch(reference=1.0, fast=0.5), few, candidate(reference), tokens=2).used == "fast"


def fills(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2, out=out)


def test_what_is_filled_is_the_result() -> None:
    def lazy(x: torch.Tensor, out: torch.Tensor) -> None:
        out[1:] = 2 * x[1:]

    into = Operation(
        name="double", meaning="", reference=fills, disagreement=relative_error(1e-6), filled=1,
        inputs=lambda case, g: (torch.randn(3, generator=g), torch.full((3,), torch.nan)),
        candidates=(candidate(fills), candidate(lazy)),
    )  # fmt: skip
    choice = Registry([into], CPU, Watch(fills=1.0)).choose("double", {}, torch.float32)
    assert choice.function is fills and choice.findings[1].verdict is Verdict.WRONG


def told_by(*others: dict[str, Any]) -> Callable[[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Ranks of which this one is the first; the others tell what is theirs to tell at each turn."""
    turns = iter(others)
    return lambda mine: [mine, next(turns)]


def test_ranks_decide_alike() -> None:
    """Each candidate is as slow as on its slowest rank, and what one rank lacks or gets wrong nobody uses."""
    known = {"watch": Watch(reference=3e-6, fast=1e-6)}

    def decide(*others: dict[str, Any]) -> Choice:
        both = operation(candidate(reference), candidate(fast))
        registry = Registry([both], CPU, known["watch"], told_by(*others))
        return registry.choose("double", {"tokens": 3}, torch.float32)

    there = decide({}, {}, {"reference": 3e-6, "fast": 4e-6})
    assert there.used == "reference" and there.findings[1].microseconds == pytest.approx(4.0)
    assert decide({}, {}, {"reference": 9e-6, "fast": 4e-6}).used == "fast"
    absent = decide({"fast": "not installed"}, {}, {"reference": 3e-6})
    assert absent.findings[1] == Finding("fast", Verdict.ABSENT, "rank 1: not installed")
    wrong = decide({}, {"fast": "relative error 1.0"}, {"reference": 3e-6})
    assert wrong.findings[1] == Finding("fast", Verdict.WRONG, "rank 1: relative error 1.0")
    tired = decide({}, {}, {"reference": 3e-6, "fast": "it failed: no memory"})
    assert tired.findings[1] == Finding("fast", Verdict.WRONG, "rank 1: it failed: no memory")


def test_nobody_is_asked_at_sizes_that_only_one_is_made_for() -> None:
    def never(mine: dict[str, Any]) -> Sequence[dict[str, Any]]:
        raise AssertionError

    misfit = Candidate(name="misfit", load=lambda: pytest.fail("loaded"), unfit=lambda case: "other sizes")
    alone = operation(candidate(reference, trusted=True), misfit)
    assert Registry([alone], CPU, Watch(), never).choose("double", {"tokens": 3}, torch.float32).used == "reference"


def test_a_reference_alone_is_not_run() -> None:
    def never(case: Case, g: torch.Generator) -> Sequence[Any]:
        raise AssertionError

    alone = Operation(
        name="double", meaning="", reference=reference, inputs=never, disagreement=relative_error(0.0),
        candidates=(Candidate(name="absent", load=lambda: "no"), candidate(reference, trusted=True)),
    )  # fmt: skip
    choice = Registry([alone], CPU, Watch()).choose("double", {}, torch.float32)
    assert choice.used == "reference" and choice.findings[1].microseconds is None


def test_nothing_right_is_an_error_that_tells_all() -> None:
    with pytest.raises(RuntimeError, match="double .*'tokens': 3.*wrong: wrong, relative error .*; absent: absent, no"):
        choose(Watch(), candidate(wrong), Candidate(name="absent", load=lambda: "no"))


def test_choices_are_kept_by_shape_and_type() -> None:
    watch = Watch(reference=1.0, fast=0.5)
    registry = Registry([operation(candidate(reference), candidate(fast))], CPU, watch)
    first = registry.choose("double", {"tokens": 3}, torch.float32)
    assert registry.choose("double", {"tokens": 3}, torch.float32) is first and len(watch.timed) == 2
    registry.choose("double", {"tokens": 4}, torch.float32)
    assert len(watch.timed) == 4


def test_the_clock_of_a_cpu() -> None:
    calls = []
    assert 0 <= cpu_seconds(lambda: calls.append(0), repeats=3) < 1
    assert len(calls) == 4


# The operations themselves, with torch standing in for TensorRT-LLM's operators.


class Operators(Trtllm):
    def operator(self, name: str) -> Function | str:
        return OPERATORS.get(name, f"no {name}")


def _topk(scores: torch.Tensor, length: torch.Tensor, found: torch.Tensor, next_n: int, k: int) -> None:
    found.copy_(indexer_topk(HERE).reference(scores, length, k).flip(-1))  # in another order


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = quantize_rows(x)
    columns = torch.full((scale.shape[1], -(-len(x) // 4) * 4), torch.nan)
    columns[:, : len(x)] = scale.t()
    return values, columns


def _product(values: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = values.float().unflatten(1, (-1, 128)) * columns[:, : len(values)].t()[..., None]
    blocks = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (rows.flatten(1) @ blocks.t()).bfloat16()


OPERATORS: dict[str, Function] = {
    "dsv3_router_gemm_op": lambda a, b, bias, dtype: (a.float() @ b.float()).to(dtype),
    "dsv3_fused_a_gemm_op": lambda a, b, bias, dtype: a @ b,
    "indexer_topk_decode": _topk,
    "fp8_quantize_1x128": _quantize,
    "fp8_block_scaling_gemm_impl": _product,
}
HERE = Here(None, lambda: Operators("tensorrt_llm 1.2.1", (), has_headers=True), lambda: "no headers")
CASES = {
    "router_product": {"tokens": 3, "hidden": DSV3_HIDDEN, "experts": 256},
    "fused_a": {"tokens": 3, "hidden": DSV3_HIDDEN, "out": DSV3_A_OUT},
    "indexer_topk": {"tokens": 3, "context": 2500, "k": 2048},
    "fp8_quantize": {"tokens": 3, "inner": 256},
    "fp8_product": {"tokens": 3, "inner": 256, "out": 384},
}


@pytest.mark.parametrize("name", list(CASES))
def test_trtllms_operators_are_called_as_they_want_it(name: str) -> None:
    choice = Registry(operations(HERE), CPU).choose(name, CASES[name], torch.bfloat16)
    (found,) = [f for f in choice.findings if f.candidate.startswith("trtllm.")]
    assert found.verdict in (Verdict.USED, Verdict.SLOWER), found


@pytest.mark.parametrize("name", ["indexer_topk", "fp8_quantize", "fp8_product"])
def test_a_defect_of_an_operator_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(scores: torch.Tensor, length: torch.Tensor, found: torch.Tensor, next_n: int, k: int) -> None:
        _topk(scores, length, found, next_n, k)
        found[:, -1] = found[:, -2]

    defects: dict[str, tuple[str, Function]] = {
        "indexer_topk": ("indexer_topk_decode", late),
        "fp8_quantize": ("fp8_quantize_1x128", lambda x: (_quantize(x)[0], _quantize(x)[1].roll(1, 0))),
        "fp8_product": ("fp8_block_scaling_gemm_impl", lambda v, w, c, s: _product(v, w, c, s.roll(1, 1))),
    }
    monkeypatch.setitem(OPERATORS, *defects[name])
    choice = Registry(operations(HERE), CPU).choose(name, CASES[name], torch.bfloat16)
    (found,) = [f for f in choice.findings if f.candidate.startswith("trtllm.")]
    assert found.verdict is Verdict.WRONG and choice.used == "torch"


@pytest.mark.parametrize("operator", ["fp8_block_scaling_gemm_impl", "fp8_quantize_1x128"])
def test_of_two_operators_the_one_that_is_not_there_is_named(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPERATORS, operator)
    choice = Registry(operations(HERE), CPU).choose("fp8_product", CASES["fp8_product"], torch.bfloat16)
    (found,) = [f for f in choice.findings if f.candidate.startswith("trtllm.")]
    assert (found.verdict, found.reason) == (Verdict.ABSENT, f"no {operator}")


def test_other_sizes_than_they_were_made_for_are_left_to_torch() -> None:
    sizes = {"tokens": 3, "hidden": 64, "experts": 16, "out": 48, "context": 20, "k": 8, "inner": 200}
    registry = Registry(operations(HERE), CPU)
    for name in CASES:
        if name != "fp8_quantize":
            choice = registry.choose(name, sizes, torch.bfloat16)
            (found,) = [f for f in choice.findings if f.candidate.startswith("trtllm.")]
            assert found.verdict is Verdict.UNFIT and found.reason, found


def test_weights_in_fp8_are_what_their_blocks_say() -> None:
    weight = torch.randn((256, 384)) * torch.logspace(-3, 3, 384)
    values, scale = quantize_blocks(weight)
    assert values.shape == weight.shape and scale.shape == (2, 3)
    back = values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert float((back[block] - weight[block]).abs().max()) < 0.07 * float(weight[block].abs().max())
            assert float(values[block].float().abs().max()) == 448.0


SMALL = {
    "tokens": 3, "hidden": 64, "inner": 48, "experts": 4, "top_k": 2, "heads": 4, "latent": 64, "rope": 16,
    "context": 100, "parts": 3,
}  # fmt: skip


def test_steps_operations_agree_with_themselves_on_inputs_that_matter() -> None:
    """Each one's inputs fit its reference, and a result a hundredth off is noticed."""
    for made in step_operations(HERE):
        case = Case(dims=SMALL, dtype=torch.float32, device=CPU)
        arguments = made.inputs(case, torch.Generator().manual_seed(1))
        returned = made.reference(*arguments)
        parts = arguments[-made.filled :] if made.filled else (returned,)
        assert not any(bool(part.isnan().any()) for part in parts)
        for wrong in range(len(parts)):
            scaled = tuple(part * 1.03 if i == wrong else part.clone() for i, part in enumerate(parts))
            both = (parts, scaled) if len(parts) > 1 else (parts[0], scaled[0])
            assert made.disagreement(both[0], both[0]) is None and made.disagreement(*both) is not None, made.name
        assert [c.load() for c in made.candidates if c.name.startswith("triton")] == [
            "Triton's kernels need a GPU, and this machine has none"
        ]


def test_attention_is_timed_in_parts_for_the_device_that_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splash_engines.operations_step.num_sms_of", lambda device: 7)
    made = next(operation for operation in step_operations(HERE) if operation.name == "mla_attention")
    case = Case(dims={**SMALL, "context": 6000}, dtype=torch.float32, device=CPU)
    arguments = made.inputs(case, torch.Generator().manual_seed(1))
    length, parts = arguments[5].numpy(), arguments[6].part.tolist()
    assert parts == cut(length, SMALL["heads"], 7)[0].tolist() != cut(length, SMALL["heads"])[0].tolist()
