"""One calibration: measures cells, fits to three quarters of the grid, and says how well the rest is predicted."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from splash_trt.calibrate.cells import Cell, Limits, grid, random_cells
from splash_trt.calibrate.fit import Sample, errors, fit
from splash_trt.calibrate.measure import Bench, Progress, calibration_config, measure, product_rate
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.place import gpu_name, run_on_of
from splash_trt.dist.world import World
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.device import Device
from splash_trt.scheduler.devices import described_gpu, this_cpu
from splash_trt.version import __version__
from splash_trt.weights.source import WeightSource

LIMITS = Limits(cache_tokens=8192, context=2048, requests=32, tokens=512)
"""For CPUs, whose steps would take seconds beyond these."""
GPU_LIMITS = Limits(cache_tokens=1 << 19, context=32768, requests=512, tokens=8192)
RANDOM_CELLS = 32
HELD_EVERY = 4
"""One in so many cells of the grid is held out: predicted instead of fitted."""
RANDOM_SEED = 7
MOST_ERROR = 0.3
"""Median error of a calibration that may be trusted."""


@dataclass(frozen=True)
class Predicted:
    """A cell that was held out: its measured time and the signed relative error of its prediction."""

    cell: Cell
    seconds: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted device, and how well it predicts."""

    device: Device
    fitted: int
    """How many cells were fitted to."""
    held: tuple[Predicted, ...]
    """The cells that were held out: some of the grid, and all random ones."""

    def quantile(self, share: float, layout: Layout | None = None) -> float:
        """A quantile of the absolute relative errors of the cells that were held out; NaN if there are none."""
        found = [abs(p.error) for p in self.held if layout in (None, p.cell.layout)]
        return float(np.quantile(found, share)) if found else float("nan")


def calibrate(
    world: World,
    model: ModelConfig,
    source: WeightSource,
    *,
    dtype: str,
    seconds: float,
    limits: Limits | None = None,
    layouts: tuple[Layout, ...] = tuple(Layout),
    cores: int | None = None,
    simulate_routing: str = "",
    experts_cut: str = "whole",
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = lambda text: None,
) -> Calibration | None:
    """To be called on every rank; rank 0 gets the calibration, the others None when it is done.

    seconds: how long to measure. cores: how many the ranks run on; None: as many as this process may use. Raises
    ValueError for a GPU that has no built-in description, from which the fit starts.
    """
    name = gpu_name(world)
    gpu = None if name is None else described_gpu(name)
    limits = limits or (GPU_LIMITS if gpu is not None else LIMITS)
    limits = replace(limits, context=min(limits.context, model.max_positions))
    layouts = layouts if world.size > 1 else layouts[:1]
    config = calibration_config(
        model,
        num_ranks=world.size,
        dtype=dtype,
        limits=limits,
        layouts=layouts,
        run_on=run_on_of(world),
        simulate_routing=simulate_routing,
        experts_cut=experts_cut,
    )
    bench = Bench(world, model, config, source, clock)
    if world.rank != 0:
        bench.follow()
        return None
    cells = grid(layouts, world.size, limits)
    others = random_cells(layouts, world.size, limits, RANDOM_CELLS, RANDOM_SEED)
    found = measure(bench, [*cells, *others], seconds, progress)
    if gpu is None:
        rate = product_rate(config.dtype)
        base = this_cpu(cores=cores, float32_flops=rate)
        base = replace(base, flops=dict.fromkeys(base.flops, rate))
    else:
        base = gpu
    bench.release()
    pairs = [(cell, sample) for cell, sample in zip([*cells, *others], found, strict=True) if sample is not None]
    # Layouts take turns in the grid; the offset that grows by one per turn holds out as many cells of each layout.
    held = {id(cell) for i, cell in enumerate(cells) if (i // len(layouts) + i) % HELD_EVERY == 1}
    held |= {id(cell) for cell in others}
    samples = [sample for cell, sample in pairs if id(cell) not in held]
    device = fit(model, config, base, samples)
    return _told(model, config, device, len(samples), [pair for pair in pairs if id(pair[0]) in held])


def _told(
    model: ModelConfig, config: EngineConfig, device: Device, fitted: int, held: Sequence[tuple[Cell, Sample]]
) -> Calibration:
    off = errors(model, config, device, [sample for _, sample in held])
    predicted = tuple(
        Predicted(cell, sample.seconds, error) for (cell, sample), error in zip(held, off.tolist(), strict=True)
    )
    result = Calibration(device=device, fitted=fitted, held=predicted)
    median, p90 = result.quantile(0.5), result.quantile(0.9)
    named = replace(
        device,
        name=f"{_processor() if config.run_on == 'cpu' else device.name}, {config.num_ranks} ranks",
        origin=f"Fitted to {fitted} steps of {model.model_type} ({model.num_layers} layers) in {config.dtype} on "
        f"{config.num_ranks} ranks of this machine; {len(predicted)} steps that were not fitted were predicted with a "
        f"median error of {median:.1%}.",
        provenance={
            "cpu": _processor(), "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(), "torch": metadata.version("torch"), "numpy": np.__version__,
            "splash_trt": __version__, "commit": _commit(),
            "date_utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "ranks": config.num_ranks, "dtype": config.dtype, "model": model.model_type, "steps_fitted": fitted,
            "steps_held_out": len(predicted), "median_error": round(median, 4), "p90_error": round(p90, 4),
        },
    )  # fmt: skip
    return replace(result, device=named)


def report(result: Calibration) -> str:
    """The calibration as text for the user."""
    d = result.device
    factors = ", ".join(f"{kind} {factor:.3g}" for kind, factor in sorted(d.factors.items()))
    lines = [
        f"device      {d.name}",
        f"step        {d.step_s * 1e6:.0f} us, operation {d.operation_s * 1e6:.1f} us, "
        f"expert {d.expert_s * 1e6:.1f} us, collective {d.collective_s * 1e6:.0f} us",
        f"factors     {factors}",
        f"steps       {result.fitted} fitted, {len(result.held)} predicted without",
        f"error       median {result.quantile(0.5):.1%}, 90th percentile {result.quantile(0.9):.1%}",
    ]
    for layout in sorted({p.cell.layout for p in result.held}):
        median, p90 = result.quantile(0.5, layout), result.quantile(0.9, layout)
        lines.append(f"  {layout.name.lower():<10}median {median:.1%}, 90th percentile {p90:.1%}")
    return "\n".join(lines)


def doubt(result: Calibration) -> str | None:
    """What a user has to know of a calibration that predicts badly; None: it does not."""
    median = result.quantile(0.5)
    if not median > MOST_ERROR:
        return None
    return (
        f"WARNING: the median error is {median:.0%}: above {MOST_ERROR:.0%}, --layout auto decides badly by it. "
        "Calibrate again with more --minutes, while nothing else runs on this machine"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _commit() -> str:
    """The git commit of the tree that this program runs from; empty if there is none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
