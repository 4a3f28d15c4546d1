"""The runtime for plans keeps TensorRT's protocol, as a stand-in that enforces it sees it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from splash_engines.tensorrt import plan_runtime
from splash_engines.tensorrt.active_set import ActiveSet
from splash_engines.tensorrt.plan_runtime import PlanExecutor, PlanPool
from splash_engines.tensorrt.plans import Plan, TensorList
from splash_trt.config import Layout
from tests.layouts.harness import Models
from tests.oracles.tensorrt_runtime import Device, Network, ProtocolError, Recorder
from tests.tensorrt import evaluated, segments_harness
from tests.tensorrt.evaluated import EvaluatorExecutor, Networks
from tests.tensorrt.segments_harness import Rank, worst
from tests.tensorrt.served import first_differences, requests, serve

WIDTH = 4
NEAR_TIE = 1e-3  # a first difference of tokens in float32
NAMES = {dtype: name for name, dtype in plan_runtime.DTYPES.items()}


def network(name: str, factor: float = 2.0, scratch: int = 512) -> Network:
    """y [T, 4] = factor * x [T, 4] + own.w [4]."""
    return Network(
        name,
        {"x": ((-1, WIDTH), torch.float32), "own.w": ((WIDTH,), torch.float32)},
        {"y": ((-1, WIDTH), torch.float32)},
        lambda given: {"y": factor * given["x"] + given["own.w"]},
        profiles=((1, 8), (1, 64)),
        scratch=scratch,
    )


def plan_of(network: Network) -> Plan:
    def listed(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> TensorList:
        return tuple((name, shape, NAMES[dtype]) for name, (shape, dtype) in tensors.items())

    return Plan(
        key=network.name, kind=network.name.split("/")[0], inputs=listed(network.inputs),
        outputs=listed(network.outputs), num_bytes=1, checksum="",
    )  # fmt: skip


class Rig:
    """Two kinds of segments, each with a plan, and a layer's tensors."""

    def __init__(self, *networks: Network) -> None:
        self.device = Device()
        self.recorder = Recorder(self.device)
        self.pool = PlanPool(self.recorder, self.device, lambda plan: plan.key.encode())  # type: ignore[arg-type]
        self.executor = self.executor_of(*(networks or (network("up"), network("down", 3.0, scratch=4096))))
        self.weights = {layer: torch.full((WIDTH,), float(layer)) for layer in range(3)}
        self.outputs: dict[int, torch.Tensor] = {}

    def executor_of(self, *networks: Network) -> PlanExecutor:
        self.recorder.networks |= {n.name.encode(): n for n in networks}
        return PlanExecutor(self.pool, {plan.kind: plan for plan in map(plan_of, networks)})

    def run(self, kind: str, layer: int, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full_like(x, torch.nan) if out is None else out
        self.executor.run(kind, layer, {"x": x, "own.w": self.weights[layer]}, {"y": out})
        return out


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_step_is_computed_where_its_tensors_are(rig: Rig) -> None:
    x = torch.randn((5, WIDTH))
    for layer in range(3):
        torch.testing.assert_close(rig.run("up", layer, x), 2 * x + layer)
        torch.testing.assert_close(rig.run("down", layer, x), 3 * x + layer)
    assert rig.executor.signature("up").outputs == {"y": ((-1, WIDTH), torch.float32)}  # type: ignore[union-attr]
    assert rig.executor.signature("moe") is None


def test_a_layers_weights_are_bound_once(rig: Rig) -> None:
    for rows in (1, 7, 7, 3, 2):
        x = torch.randn((rows, WIDTH))
        for layer in range(3):
            rig.run("up", layer, x)
        rig.device.finish()
    assert rig.recorder.num_contexts == 3
    assert sorted(number for number, name in rig.recorder.told if name == "own.w") == [1, 2, 3]


def test_nothing_is_told_twice_to_the_same_step(rig: Rig) -> None:
    x, out = torch.randn((5, WIDTH)), torch.empty((5, WIDTH))
    rig.run("up", 0, x, out)
    told = len(rig.recorder.told)
    for _ in range(3):  # in flight all the time
        rig.run("up", 0, x, out)
    assert len(rig.recorder.told) == told and rig.recorder.num_contexts == 1 and rig.device.waits == 0


def test_two_steps_in_flight_have_a_context_each_and_a_third_one_waits(rig: Rig) -> None:
    for index in range(5):
        x = torch.randn((2, WIDTH))
        torch.testing.assert_close(rig.run("up", 1, x), 2 * x + 1)
        assert rig.recorder.num_contexts == min(index + 1, 2)
        assert rig.device.waits == max(0, index - 1)
        rig.outputs[index] = x  # kept, so that each step's tensors are elsewhere
    used = [e.context for e in rig.recorder.executions]
    assert used == [1, 2, 1, 2, 1]


def test_a_context_that_does_not_wait_would_be_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [torch.randn((2, WIDTH)) for _ in range(2)]
    rig.run("up", 1, kept[0])
    monkeypatch.setattr(plan_runtime.Context, "idle", lambda self: True)
    with pytest.raises(ProtocolError, match="changes while the context may be running"):
        rig.run("up", 1, kept[1])


def test_all_contexts_share_the_largest_scratch_memory(rig: Rig) -> None:
    x = torch.randn((2, WIDTH))
    for kind in ("up", "down"):
        for layer in range(2):
            rig.run(kind, layer, x)
    assert len({e.scratch for e in rig.recorder.executions}) == 1
    before = rig.recorder.executions[-1].scratch
    rig.executor_of(network("wide", scratch=1 << 16))
    rig.run("up", 0, x)
    rig.run("down", 1, x)
    after = {e.scratch for e in rig.recorder.executions[-2:]}
    assert len(after) == 1 and before not in after
    gc.collect()
    assert rig.recorder.broken == []


def test_a_step_takes_the_smallest_profile_that_holds_it(rig: Rig) -> None:
    rig.run("up", 0, torch.randn((8, WIDTH)))
    rig.device.finish()
    rig.run("up", 0, torch.randn((9, WIDTH)))
    rig.device.finish()
    rig.run("up", 0, torch.randn((64, WIDTH)))
    assert [e.context for e in rig.recorder.executions] == [1, 2, 2]
    with pytest.raises(ValueError, match=r"up: x \[65, 4\] is beyond what the plan was built for.*--max-batch-tokens"):
        rig.run("up", 0, torch.randn((65, WIDTH)))


def test_a_captured_step_is_replayed_without_a_context(rig: Rig) -> None:
    x, middle, out = (torch.randn((3, WIDTH)) for _ in range(3))

    def step() -> torch.Tensor:
        rig.run("up", 0, x, middle)
        return rig.run("down", 2, middle, out)

    replay, found = rig.device.capture(step)
    told = list(rig.recorder.told)
    for _ in range(2):
        x.copy_(torch.randn((3, WIDTH)))
        replay()
        torch.testing.assert_close(found, 3 * (2 * x) + 2)
        # The same contexts go on serving other steps while the graph runs.
        other = torch.randn((2, WIDTH))
        torch.testing.assert_close(rig.run("up", 0, other), 2 * other)
        rig.device.finish()
    assert rig.recorder.told[: len(told)] == told
    captured = [e for e in rig.recorder.executions if e.captured]
    assert len(captured) == 4 and captured[0].addresses == captured[2].addresses


def test_a_context_is_not_made_inside_a_capture(rig: Rig) -> None:
    calls = []

    def step() -> None:
        calls.append(0)
        rig.run("up", len(calls), torch.randn((2, WIDTH)))

    with pytest.raises(AssertionError, match="for the first time inside a capture"):
        rig.device.capture(step)


class Recorded:
    """A set of engines that says what ran on it."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig = rig
        self.name = name
        self.executor = rig.executor_of(network(f"up/{name}"))

    def activate(self) -> None:
        self.executor.activate()

    def retire(self) -> None:
        self.executor.retire()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.rig.executor = self.executor
        return self.rig.run("up", 0, x)


def test_a_swap_sets_one_reference_and_the_old_set_executes_no_more() -> None:
    rig = Rig()
    first, second = Recorded(rig, "tp"), Recorded(rig, "dp")
    active = ActiveSet(first)
    x = torch.randn((2, WIDTH))
    with active.step() as engines:
        engines.step(x)
        with pytest.raises(AssertionError, match="between steps"):
            active.swap(second)
        engines.step(x)
    assert active.swap(second) is first  # while the first one's work is in flight
    with active.step() as engines:
        torch.testing.assert_close(engines.step(x), 2 * x)
    assert [e.network for e in rig.recorder.executions] == ["up/tp", "up/tp", "up/dp"]
    with pytest.raises(AssertionError, match="swapped out"):
        first.step(x)
    active.swap(first)
    with active.step() as engines:
        engines.step(x)
    assert rig.recorder.executions[-1].network == "up/tp"
    with pytest.raises(AssertionError, match="swapped out"):
        second.step(x)


def test_a_plan_for_another_gpu_is_refused_with_a_remedy() -> None:
    rig = Rig()
    rig.recorder.networks.clear()
    with pytest.raises(ValueError, match="up: stand-in 1.0 does not load the plan on this GPU: .*not compatible"):
        PlanExecutor(rig.pool, {"up": Plan(**{**_fields(plan_of(network("up"))), "key": "unknown"})})


def _fields(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_a_refused_execution_names_its_segment(rig: Rig) -> None:
    rig.recorder.refuse = True
    with pytest.raises(RuntimeError, match="up: TensorRT refused execution"):
        rig.run("up", 0, torch.randn((2, WIDTH)))


def test_tensors_of_other_names_types_or_layouts_are_bugs(rig: Rig) -> None:
    x = torch.randn((2, WIDTH))
    with pytest.raises(AssertionError, match="takes"):
        rig.executor.run("up", 0, {"x": x}, {"y": x.clone()})
    with pytest.raises(AssertionError, match="takes"):
        rig.run("up", 0, x.bfloat16())
    with pytest.raises(AssertionError, match="has gaps"):
        rig.run("up", 0, torch.randn((WIDTH, 2)).t())
    with pytest.raises(AssertionError, match="y is"):
        rig.run("up", 0, x, torch.empty((3, WIDTH)))


def test_closing_waits_and_lets_go_in_order(rig: Rig) -> None:
    for layer in range(3):
        rig.run("up", layer, torch.randn((2, WIDTH)))
    rig.pool.close()
    gc.collect()
    assert rig.device.completed == rig.device.enqueued and rig.recorder.broken == []


def test_letting_go_of_what_runs_would_be_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.run("up", 0, torch.randn((2, WIDTH)))
    monkeypatch.setattr(plan_runtime.Context, "wait", lambda self: None)
    rig.pool.close()
    gc.collect()
    assert rig.recorder.broken == ["up: a context went while it may be running"]


class Planned(EvaluatorExecutor):
    """The evaluated networks behind plans, contexts and addresses."""

    def __init__(self, networks: Networks, layout: Layout, collectives: Any) -> None:
        super().__init__(networks, layout, collectives)
        self.rig = Rig()
        self.executors: dict[str, PlanExecutor] = {}
        ALL_PLANNED.append(self)

    def run(
        self, kind: str, layer: int | None, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        if kind not in self.executors:
            found = self._get(kind)
            assert found is not None
            listed = [{n: (tuple(v.shape), v.dtype) for n, v in t.items()} for t in (found.inputs, found.outputs)]
            made = Network(kind, *listed, lambda given: found(given, self._all_reduce))
            self.executors[kind] = self.rig.executor_of(made)
        self.executors[kind].run(kind, layer, inputs, outputs)


ALL_PLANNED: list[Planned] = []


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Planned]:
    """Those that a test makes."""
    monkeypatch.setattr(segments_harness, "EvaluatorExecutor", Planned)
    monkeypatch.setattr(evaluated, "EvaluatorExecutor", Planned)
    ALL_PLANNED.clear()
    return ALL_PLANNED


def check_protocol(planned: list[Planned]) -> None:
    for each in planned:
        each.rig.pool.close()
    gc.collect()
    for each in planned:
        assert each.rig.recorder.executions and each.rig.recorder.broken == []


@pytest.mark.parametrize(("layout", "size"), [(Layout.TP, 2), (Layout.DP, 2)])
def test_real_segments_go_through_it(models: Models, planned: list[Planned], layout: Layout, size: int) -> None:
    """What a rank's segments compute through plans is what plain torch computes."""
    kept = Networks(models.config("v3_half_rope"), torch.float32, experts="moe_in")
    found = worst(Rank(models.config("v3_half_rope"), layout, 1, size, "float32", kept))
    assert len(found) >= 8 and max(found.values()) < 2e-5, found
    check_protocol(planned)


def test_a_whole_server_goes_through_it(models: Models, planned: list[Planned]) -> None:
    """Two ranks that switch through all layouts while they answer give the tokens of plain torch."""
    asked = requests([[5, 6, 7, 8, 9], [11, 3], list(range(20, 39))], 8)
    folder = models.folder("v3_half_rope")
    expected = serve(folder, asked, ranks=1, tour=[Layout.TP], dtype="float32")
    with evaluated.evaluator(Networks(models.config("v3_half_rope"), torch.float32), attention=False):
        tour = (Layout.TP, Layout.DP, Layout.CP, Layout.DOP)
        got = serve(folder, asked, ranks=2, tour=tour, dtype="float32")
    assert not [each for each in first_differences(got, expected) if not each[2] < NEAR_TIE]
    assert len(planned) == 2 * len(Layout)
    check_protocol(planned)
