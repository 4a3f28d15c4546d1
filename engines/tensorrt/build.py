"""Builds plans for a checkpoint, from a user's options (splash-trt build --engine tensorrt)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from splash_engines.tensorrt.cache import PlanCache
from splash_engines.tensorrt.plans import Built, Form, PlanSettings, Progress, build_plans
from splash_engines.trt_api import capability_name, load_api
from splash_trt.config import Layout
from splash_trt.models.families import load_config


def build_for_checkpoint(
    model_dir: Path,
    *,
    targets: Sequence[str],
    ranks: Sequence[str],
    layouts: Sequence[str],
    dtype: str | None,
    max_batch_tokens: int,
    page_tokens: int,
    form: str | None,
    collectives_in: bool,
    cache: Path,
    progress: Progress | None = None,
) -> tuple[PlanCache, Built]:
    """Builds the plans of the model whose config.json is in model_dir; reads no weights.

    Without `targets` they are for this machine's GPU. Raises ValueError for wrong options, and BuildFailure if TensorRT
    refuses a network.
    """
    model = load_config(model_dir)
    gpu = this_gpu()
    if not targets:
        if gpu is None:
            raise ValueError("target: this machine has no GPU to take it from; give one, such as --target sm_89,sm_120")
        targets = (gpu,)
    settings = PlanSettings(
        targets=tuple(sorted(set(targets), key=lambda name: (len(name), name))),
        ranks=_numbers(ranks),
        layouts=_layouts(layouts),
        dtype=dtype or model.dtype,
        max_batch_tokens=max_batch_tokens,
        page_tokens=page_tokens,
        form=Form(form) if form else None,
        collectives_in=collectives_in,
    )
    store = PlanCache(cache)
    return store, build_plans(load_api(gpu, settings.targets), model, settings, store, progress)


def this_gpu() -> str | None:
    """This machine's GPU, such as sm_90; None without one."""
    return capability_name(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _layouts(words: Sequence[str]) -> tuple[Layout, ...]:
    try:
        return tuple(sorted({Layout.parse(word) for word in words})) or tuple(Layout)
    except ValueError as error:
        raise ValueError(f"layouts{str(error).removeprefix('layout')}") from error


def _numbers(words: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in words}))
    except ValueError as error:
        raise ValueError(f"ranks: {','.join(words)!r} must be numbers, such as 1,2,4") from error
