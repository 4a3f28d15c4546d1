"""An engine's folder is opened for execution, and refused where it does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from splash_engines.tensorrt.cache import PlanCache
from splash_engines.tensorrt.plan_executors import executors_of
from splash_engines.tensorrt.plans import Form, PlanSet, PlanSettings, Use
from splash_engines.tensorrt.store import write_plans
from splash_trt.config import Layout
from tests.oracles.tensorrt_runtime import Device, Recorder
from tests.tensorrt.test_plan_runtime import WIDTH, network, plan_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engine(tmp_path)


def engine(tmp_path: Path, **settings: Any) -> Path:
    """Two layouts on two ranks; rank 1 under DP shares its plan with rank 0. settings: beside those of the layouts."""
    cache, plans, uses = PlanCache(tmp_path / "cache"), {}, []
    for layout in (Layout.TP, Layout.DP):
        for rank in range(2):
            name = "dp0" if layout is Layout.DP else f"tp{rank}"
            entry = cache.add(name, f"bytes of {name}".encode(), 1.0)
            made = plan_of(network(f"up/{name}"))
            plans[name] = dataclasses.replace(made, key=name, checksum=entry.checksum, num_bytes=entry.num_bytes)
            uses.append(Use(num_ranks=2, layout=layout, rank=rank, plans={"up": name}))
    given = PlanSettings(targets=("sm_89",), ranks=(2,), layouts=(Layout.TP, Layout.DP), **settings)
    plan_set = PlanSet(builder="stand-in 1.0", settings=given, form=Form.PLUGIN, plans=plans, uses=tuple(uses))
    made_folder = tmp_path / "engine"
    made_folder.mkdir()
    write_plans(plan_set, cache, made_folder)
    return made_folder


class Machine:
    def __init__(self, *names: str) -> None:
        self.device = Device()
        self.recorder = Recorder(self.device)
        for index, name in enumerate(names):
            self.recorder.networks[f"bytes of {name}".encode()] = network(f"up/{name}", float(index + 1))

    def open(self, folder: Path, rank: int = 0, num_ranks: int = 2, gpu: str = "sm_89"):  # type: ignore[no-untyped-def]
        return executors_of(folder, num_ranks=num_ranks, rank=rank, api=self.recorder, device=self.device, gpu=gpu)  # type: ignore[arg-type]


def test_each_layout_runs_the_plans_of_its_rank(folder: Path) -> None:
    machine = Machine("tp0", "tp1", "dp0")
    pool, executors = machine.open(folder, rank=1)
    assert list(executors) == [Layout.TP, Layout.DP]
    x, w = torch.randn((3, WIDTH)), torch.randn(WIDTH)
    for layout, factor in ((Layout.TP, 2.0), (Layout.DP, 3.0)):
        y = torch.empty((3, WIDTH))
        executors[layout].run("up", 0, {"x": x, "own.w": w}, {"y": y})
        torch.testing.assert_close(y, factor * x + w)
    assert [e.network for e in machine.recorder.executions] == ["up/tp1", "up/dp0"]
    pool.close()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"gpu": "sm_90"}, "its plans are for sm_89, and this GPU is sm_90; build the engine with --target sm_90"),
        ({"num_ranks": 4}, "the engine's plans are for 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, where: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine("tp0", "tp1", "dp0").open(folder, **where)


def test_plans_of_another_version_are_refused(folder: Path) -> None:
    machine = Machine("tp0", "dp0")
    machine.recorder.version = "2.0"
    with pytest.raises(ValueError, match=r"plans are by stand-in 1.0, and stand-in 2.0 is installed"):
        machine.open(folder)


def test_plans_that_need_a_communicator_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside the networks.*build the engine with --collectives border"):
        Machine().open(engine(tmp_path, collectives_in=True))


def test_a_changed_plan_is_refused(folder: Path) -> None:
    (folder / "plans" / "dp0.plan").write_bytes(b"bytes of dp1")
    with pytest.raises(ValueError, match=r"dp0.plan: was changed or damaged"):
        Machine("tp0", "dp0").open(folder)
