"""The GPU program's table has TensorRT-LLM's operators at exactly those rows where they are right and faster, and says
why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from splash_engines.choose import Used, choose_kernels
from splash_engines.inspect_operations import DEEPSEEK_EXPERTS
from splash_engines.kernels import Kernels
from splash_engines.kernels_reference import REFERENCE
from splash_engines.operations import DSV3_A_OUT, DSV3_HIDDEN, Here
from splash_engines.operations_program import program_operations
from splash_engines.registry import Case, Dims, Function, Registry
from splash_engines.trtllm import Trtllm
from splash_plugins.router import reference as router
from splash_trt.models.config import Experts

CPU = torch.device("cpu")
DEEPSEEK: dict[str, Dims] = {
    "project_in": {"hidden": DSV3_HIDDEN, "out": DSV3_A_OUT},
    "route": {"hidden": DSV3_HIDDEN, "experts": 256},
}
GLM: dict[str, Dims] = {"project_in": {"hidden": 2048, "out": 1344}, "route": {"hidden": 2048, "experts": 64}}
GLM_EXPERTS = dataclasses.replace(DEEPSEEK_EXPERTS, num_experts=64, top_k=4, num_groups=1, top_groups=1)


class Operators(Trtllm):
    """Torch in the place of TensorRT-LLM's operators, which count their calls."""

    def operator(self, name: str) -> Function | str:
        def call(*arguments: Any) -> torch.Tensor:
            CALLS.append(name)
            return OPERATORS[name](*arguments)

        return call


CALLS: list[str] = []
OPERATORS: dict[str, Function] = {
    "dsv3_fused_a_gemm_op": lambda a, b, bias, dtype: a @ b,
    "dsv3_router_gemm_op": lambda a, b, bias, dtype: (a.float() @ b.float()).to(dtype),
}


def timer(**seconds: float) -> Callable[[Callable[[], Any]], float]:
    """Whose names are those of operators; all else takes 2 µs."""

    def take(call: Callable[[], Any]) -> float:
        CALLS.clear()
        call()
        return seconds[CALLS[0]] if CALLS else 2e-6

    return take


def choose(
    seconds: dict[str, float],
    rows: Sequence[int] = (1, 3, 20),
    sizes: dict[str, Dims] | None = None,
    experts: Experts = DEEPSEEK_EXPERTS,
    kernels: Kernels = REFERENCE,
) -> tuple[Kernels, list[Used]]:
    here = Here(None, lambda: Operators("tensorrt_llm 1.2.1", ()), lambda: "no headers")
    registry = Registry(program_operations(here, kernels, experts), CPU, timer(**seconds))
    return choose_kernels(kernels, registry, sizes or DEEPSEEK, torch.bfloat16, rows)


FASTER = {"dsv3_fused_a_gemm_op": 1e-6, "dsv3_router_gemm_op": 1.5e-6}


def arguments(name: str, tokens: int) -> Sequence[Any]:
    here = Here(None, lambda: Operators("", ()), lambda: "")
    made = {operation.name: operation for operation in program_operations(here, REFERENCE, DEEPSEEK_EXPERTS)}[name]
    case = Case(dims={"tokens": tokens, **DEEPSEEK[name]}, dtype=torch.bfloat16, device=CPU)
    return made.inputs(case, torch.Generator().manual_seed(7))


def test_what_is_faster_is_used_where_it_fits() -> None:
    kernels, told = choose(FASTER)
    assert told == [
        Used("project_in", "1-3", "trtllm.dsv3_fused_a_gemm_op", "1.0", "own took 2.0 µs"),
        Used("project_in", "20", "own", None, told[1].why),
        Used("route", "1-3", "trtllm.dsv3_router_gemm_op", "1.5", "own took 2.0 µs"),
        Used("route", "20", "own", None, told[3].why),
    ]
    assert told[1].why.startswith("trtllm.dsv3_fused_a_gemm_op is unfit: its kernel is for 7168 to 2112 and up to 16")
    assert told[3].why.startswith("trtllm.dsv3_router_gemm_op is unfit: its kernel is for 256 experts, hidden 7168")
    for rows, calls in ((1, 1), (2, 0), (3, 1), (20, 0)):  # 2 was not asked for: nobody has looked whether it is right
        CALLS.clear()
        x, w = arguments("project_in", rows)
        torch.testing.assert_close(kernels.project_in(x, w), REFERENCE.project_in(x, w))
        assert CALLS == ["dsv3_fused_a_gemm_op"] * calls
        CALLS.clear()
        routed, expected = arguments("route", rows), arguments("route", rows)
        kernels.route(*routed)
        REFERENCE.route(*expected)
        assert torch.equal(routed[-2], expected[-2])
        torch.testing.assert_close(routed[-1], expected[-1], rtol=1e-5, atol=1e-6)
        assert CALLS == ["dsv3_router_gemm_op"] * calls
    changed = {field.name for field in dataclasses.fields(Kernels)
               if getattr(kernels, field.name) is not getattr(REFERENCE, field.name)}  # fmt: skip
    assert changed == {"project_in", "route"}


def test_what_is_slower_is_not_used() -> None:
    kernels, told = choose({"dsv3_fused_a_gemm_op": 3e-6, "dsv3_router_gemm_op": 4e-6}, rows=(1, 3))
    assert kernels is REFERENCE
    assert told == [
        Used("project_in", "1-3", "own", "2.0", "trtllm.dsv3_fused_a_gemm_op took 3.0 µs"),
        Used("route", "1-3", "own", "2.0", "trtllm.dsv3_router_gemm_op took 4.0 µs"),
    ]


def test_what_is_wrong_is_not_used_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "dsv3_fused_a_gemm_op", lambda a, b, bias, dtype: a @ b * 1.01)
    monkeypatch.setitem(OPERATORS, "dsv3_router_gemm_op", lambda a, b, bias, dtype: (a @ b).to(dtype).roll(1, 1))
    kernels, told = choose(FASTER, rows=(4,))
    assert kernels is REFERENCE and [used.candidate for used in told] == ["own", "own"]
    assert all(" is wrong: relative error " in used.why for used in told)


@pytest.mark.parametrize("experts", [True, False])
def test_sizes_that_none_is_made_for_cost_nothing(experts: bool) -> None:
    """No operator is looked for, nothing is run, no rank is asked, and the table is the one that there was."""

    def never(*arguments: Any) -> Any:
        raise AssertionError

    here = Here(None, never, never)
    given = GLM_EXPERTS if experts else None
    registry = Registry(program_operations(here, REFERENCE, given), CPU, never, never)
    sizes = GLM if experts else {"project_in": GLM["project_in"]}
    kernels, told = choose_kernels(REFERENCE, registry, sizes, torch.bfloat16, (1, 16, 512))
    assert kernels is REFERENCE
    assert [(used.operation, used.rows, used.candidate) for used in told] == [(name, "1-512", "own") for name in sizes]
    assert all("is unfit: its kernel is for" in used.why for used in told)


def test_ours_has_to_be_right_where_it_has_a_rival() -> None:
    broken = dataclasses.replace(REFERENCE, project_in=lambda x, w: REFERENCE.project_in(x, w) * 2)
    kernels, told = choose({**FASTER, "dsv3_fused_a_gemm_op": 9.0}, rows=(1,), kernels=broken)
    assert told[0].candidate == "trtllm.dsv3_fused_a_gemm_op" and told[0].why.startswith("own is wrong: relative error")
    x, w = arguments("project_in", 1)
    torch.testing.assert_close(kernels.project_in(x, w), REFERENCE.project_in(x, w))


def test_nothing_right_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(REFERENCE, project_in=lambda x, w: REFERENCE.project_in(x, w) * 2)
    monkeypatch.setitem(OPERATORS, "dsv3_fused_a_gemm_op", lambda a, b, bias, dtype: a @ b * torch.nan)
    with pytest.raises(RuntimeError, match="project_in .*no candidate .*own: wrong.*gemm_op: wrong.*--operators own"):
        choose(FASTER, rows=(1,), kernels=broken)


class TestRoutesThatAreTestedWith:
    """Tokens whose experts no order of summation changes, a quarter of them padding."""

    def disagreement(self, change: Callable[[torch.Tensor, torch.Tensor], None], tokens: int = 8) -> str | None:
        here = Here(None, lambda: Operators("", ()), lambda: "")
        made = program_operations(here, REFERENCE, DEEPSEEK_EXPERTS)[1]
        *given, choice, weight = arguments("route", tokens)
        made.reference(*given, choice, weight)
        changed = choice.clone(), weight.clone()
        change(*changed)
        return made.disagreement((choice, weight), changed)  # type: ignore[no-any-return]

    def test_are_decided(self) -> None:
        x, weight, bias, experts, real, choice, _ = arguments("route", 16)
        assert len(x) == 16 and int(real) == 12
        noise = 1 + 1e-5 * torch.randn(weight.shape)
        again = torch.empty_like(choice)
        for wide, into in ((weight.float(), choice), (weight.float() * noise, again)):
            router.route(x, wide, bias, experts, real, into, torch.empty(into.shape))
        assert torch.equal(choice.sort(dim=1).values, again.sort(dim=1).values)
        assert (choice[12:] == -1).all() and (choice[:12] >= 0).all()

    def test_agree_in_any_order(self) -> None:
        def flip(choice: torch.Tensor, weight: torch.Tensor) -> None:
            choice.copy_(choice.flip(1))
            weight.copy_(weight.flip(1))

        assert self.disagreement(lambda choice, weight: None) is None and self.disagreement(flip) is None

    def test_differ_in_one_expert_or_weight(self) -> None:
        def other(choice: torch.Tensor, weight: torch.Tensor) -> None:
            choice[0, -1] = next(e for e in range(256) if e not in choice[0].tolist())

        assert self.disagreement(other) is not None
        assert self.disagreement(lambda choice, weight: weight[3].mul_(1.02)) is not None

    def test_are_of_experts_that_exist_and_of_real_tokens(self) -> None:
        assert self.disagreement(lambda choice, weight: choice[:1].fill_(256)) == "8 choices are of no expert"
        said = self.disagreement(lambda choice, weight: choice[-1:].fill_(3))
        assert said == "1 tokens are padding to one of them alone"
