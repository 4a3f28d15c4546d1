"""Makes one rank's executors, for every layout, from the plans in an engine's folder."""

from __future__ import annotations

import functools
from pathlib import Path

from splash_engines.tensorrt.plan_device import Device
from splash_engines.tensorrt.plan_runtime import PlanExecutor, PlanPool
from splash_engines.tensorrt.plans import PlanSet
from splash_engines.tensorrt.store import plan_bytes, read_plans, use_of
from splash_engines.trt_api import Api
from splash_trt.config import Layout


def executors_of(
    folder: Path, *, num_ranks: int, rank: int, api: Api, device: Device, gpu: str
) -> tuple[PlanPool, dict[Layout, PlanExecutor]]:
    """(the pool that all executors share, which the caller has to close; an executor for each layout of the plans).

    gpu: the one here, such as sm_90. Raises ValueError if the plans are damaged, are for other GPUs or numbers of
    ranks, were built by another package or version than `api` (TensorRT does not load those), or sum over ranks
    themselves.
    """
    plans = read_plans(folder)
    _check(folder, plans, f"{api.name} {api.version}", gpu)
    pool = PlanPool(api, device, functools.partial(plan_bytes, folder))
    found = {}
    for layout in plans.settings.layouts:
        use = use_of(plans, num_ranks=num_ranks, layout=layout, rank=rank)
        found[layout] = PlanExecutor(pool, {kind: plans.plans[key] for kind, key in use.plans.items()})
    return pool, found


def _check(folder: Path, plans: PlanSet, builder: str, gpu: str) -> None:
    if plans.builder != builder:
        raise ValueError(
            f"{folder}: its plans are by {plans.builder}, and {builder} is installed, which does not load them; "
            "install that version, or build the engine again"
        )
    if gpu not in plans.settings.targets:
        raise ValueError(
            f"{folder}: its plans are for {', '.join(plans.settings.targets)}, and this GPU is {gpu}; build the engine "
            f"with --target {gpu}"
        )
    if plans.settings.collectives_in:
        raise ValueError(
            f"{folder}: its plans sum over ranks inside the networks, which needs a communicator, and nothing gives "
            "them one; build the engine with --collectives border"
        )
