"""Calibration on ranks that are threads, of a tiny model: plans that ranks accept, a fit, and an account of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from splash_trt.calibrate import command, measure
from splash_trt.calibrate.cells import Cell, Limits, PlanMaker, grid, random_cells
from splash_trt.calibrate.fit import Sample, errors, fit, nnls
from splash_trt.calibrate.measure import Bench, calibration_config
from splash_trt.calibrate.run import Calibration, Predicted, calibrate, report
from splash_trt.commands.calibrate import calibrate_command
from splash_trt.config import Layout
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.plan import Plan
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.devices import BUILT_IN, load_device, save_device
from splash_trt.weights.dummy import DummyWeights
from tests.unit.cost_cases import config, decode, prefill, splash_tiny

LIMITS = Limits(cache_tokens=512, context=160, requests=6, tokens=64)
TINY = replace(splash_tiny(), layers=splash_tiny().layers[:2])


def test_nnls_finds_what_a_least_squares_solver_would_within_bounds() -> None:
    source = np.random.default_rng(1)
    for _ in range(20):
        a, truth = source.random((30, 6)), source.random(6) * (source.random(6) < 0.6)
        assert nnls(a, a @ truth) == pytest.approx(truth, abs=1e-8)
        b = source.normal(size=30)
        x = nnls(a, b)
        gradient = a.T @ (b - a @ x)  # Karush, Kuhn and Tucker: 0 where x is positive, else not above it
        assert (x >= 0).all() and np.abs(gradient[x > 0]).max(initial=0) < 1e-8
        assert gradient[x == 0].max(initial=0) < 1e-8


def test_a_fit_finds_the_device_behind_the_times() -> None:
    """Steps timed by one description, fitted from another: every other step is predicted."""
    model, settings = splash_tiny(), config(2)
    truth = replace(BUILT_IN["cpu"], operation_s=40e-6, step_s=4e-3, collective_s=300e-6, expert_s=20e-6)
    truth = replace(truth, factors={"gemm": 3.0, "experts": 2.0, "decode": 7.0, "prefill": 5.0, "copies": 9.0})
    cost = CostModel(model, settings, truth)
    batches = [decode(layout, 2, n, c) for layout in Layout for n in (1, 3, 8, 32, 64) for c in (40, 300, 2000)]
    batches += [prefill(layout, 2, n, s) for layout in Layout for n in (20, 100, 500, 2000) for s in (0, 700, 3000)]
    batches += [msgspec.structs.replace(batches[0], moved_bytes=n << 20) for n in (8, 64)]
    samples = [Sample(batch, cost.step_s(batch)) for batch in batches]
    start = BUILT_IN["cpu"]
    fitted = fit(model, settings, start, samples[::2])
    before, after = (np.abs(errors(model, settings, device, samples[1::2])) for device in (start, fitted))
    assert np.median(before) > 0.3
    assert np.median(after) < 0.02 and after.max() < 0.15
    assert fitted.factors["copies"] == pytest.approx(9.0, rel=0.2)


def test_cells_fit_and_hold_all_layouts() -> None:
    cells = grid(tuple(Layout), 3, LIMITS) + random_cells(tuple(Layout), 3, LIMITS, 40, 5)
    assert {cell.layout for cell in cells} == set(Layout)
    for cell in cells:
        assert sum(count for _, count, _ in cell.rows) <= LIMITS.tokens and len(cell.rows) <= LIMITS.requests
        assert max(start + count for start, count, _ in cell.rows) <= LIMITS.context
        assert all(start >= 0 and count >= 1 and 0 <= owner < 3 for start, count, owner in cell.rows)
    assert any(cell.moved_pages for cell in cells)
    assert len({cell.name for cell in cells}) > len(cells) / 2
    assert random_cells(tuple(Layout), 3, LIMITS, 40, 5) == random_cells(tuple(Layout), 3, LIMITS, 40, 5)


def test_ranks_execute_every_cell_in_any_order() -> None:
    torch.set_num_threads(1)
    settings = calibration_config(TINY, num_ranks=3, dtype="float32", limits=LIMITS)
    cells = (grid(tuple(Layout), 3, LIMITS) + random_cells(tuple(Layout), 3, LIMITS, 12, 5))[::-5]

    def program(world: World) -> list[Cell]:
        bench = Bench(world, TINY, settings, DummyWeights(TINY, 1))
        if world.rank != 0:
            bench.follow()
            return []
        for cell in cells:
            batch, times = bench.visit(cell)
            assert batch.layout is cell.layout and batch.num_tokens == sum(count for _, count, _ in cell.rows)
            assert times and min(times) > 0
        bench.release()
        return cells

    assert ThreadWorld(3, 60.0).run(program)[0] == cells


def test_steps_on_a_gpu_are_timed_from_result_to_result() -> None:
    """A device that takes 10 for a step, once the last one is done, and a host that takes 1 to launch it."""
    now, done, told = [0.0], [0.0], list[str]()

    def send(plan: Plan) -> Callable[[], None]:
        now[0] += 1
        done[0] = end = max(now[0], done[0]) + 10
        told.append(f"launch {plan.step}")

        def take() -> None:
            now[0] = max(now[0], end)
            told.append(f"take {plan.step}")

        return take

    settings = replace(calibration_config(TINY, num_ranks=2, dtype="float32", limits=LIMITS), run_on="gpu")
    bench = Bench.__new__(Bench)
    bench.__dict__.update(
        _clock=lambda: now[0], _worker=SimpleNamespace(send=send), _config=settings, _model=TINY,
        _maker=PlanMaker(settings, TINY.vocab_size),
    )  # fmt: skip
    _, times = bench.visit(Cell(layout=Layout.TP, rows=((31, 1, 0),)))
    assert times == [10.0] * 3
    assert told[:4] == ["launch 1", "launch 2", "take 1", "launch 3"] and told[-1] == "take 4"


@pytest.mark.parametrize("minutes", ["nan", "inf", "0"])
def test_minutes_are_a_finite_number(minutes: str) -> None:
    result = CliRunner().invoke(calibrate_command, ["--engine", "/nowhere", "--minutes", minutes])
    assert result.exit_code == 2 and "'--minutes'" in result.output


def test_progress_stays_below_the_whole_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the least number of visits takes longer than the time that was asked for."""
    now, told = [0.0], list[str]()

    def visit(cell: Cell) -> tuple[None, list[float]]:
        now[0] += 3
        return None, [1.0]

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds in (0.0, 6.0, 100 * 6.0):
        bench = Bench.__new__(Bench)
        bench.__dict__.update(visit=visit)
        measure.measure(bench, grid((Layout.DP,), 1, LIMITS), seconds, told.append)
    shares = [int(text.partition("%")[0]) for text in told]
    assert len(shares) == 2 * measure.MIN_CELLS + 100 and max(shares) < 100
    assert shares[:3] == [6, 12, 19] and shares[-50:] == sorted(shares[-50:])


@pytest.mark.parametrize(("error", "warned"), [(0.29, False), (-0.77, True)])
def test_a_bad_calibration_is_kept_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: float, warned: bool
) -> None:
    cell = Cell(layout=Layout.TP, rows=((31, 1, 0),))
    result = Calibration(device=BUILT_IN["cpu"], fitted=12, held=(Predicted(cell, 0.1, error),))
    command._keep(result, tmp_path / "device-2.json")
    out, err = capsys.readouterr()
    assert load_device(tmp_path / "device-2.json") == result.device and "Wrote" in out
    assert ("WARNING: the median error is 77%" in err and "--minutes" in err) is warned and bool(err) is warned


def test_a_calibration_from_begin_to_end(tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    told: list[str] = []

    def program(world: World):  # type: ignore[no-untyped-def]
        return calibrate(
            world, TINY, DummyWeights(TINY, 1), dtype="float32", seconds=1.5, limits=LIMITS, cores=1,
            clock=time.process_time, progress=told.append,
        )  # fmt: skip

    result, other = ThreadWorld(2, 60.0).run(program)
    assert other is None
    assert result.fitted >= 6 and len(result.held) >= 2
    assert result.device.provenance["steps_held_out"] == len(result.held)
    assert result.device.provenance["ranks"] == 2 and result.device.provenance["dtype"] == "float32"
    path = tmp_path / "device-2.json"
    save_device(result.device, path)
    assert load_device(path) == result.device
    assert "error       median" in report(result)
