"""Refuses, before any rank starts, models and options that cannot be run. Most of them can be planned for."""

from __future__ import annotations

from splash_trt.config import EngineConfig
from splash_trt.models.config import ModelConfig

PLANNED_ONLY = "only `splash-trt capacity` and `splash-trt simulate` know it yet"


def refuse_unrunnable_model(model: ModelConfig) -> None:
    """Raises ValueError for a model that has parts which are not implemented."""
    if model.indexer is not None:
        raise ValueError(
            f"model_type: {model.model_type!r} attends to the cache rows that an indexer chooses; {PLANNED_ONLY}"
        )


def refuse_unrunnable(model: ModelConfig, config: EngineConfig) -> None:
    """Raises ValueError as refuse_unrunnable_model and refuse_cut do, and for formats other than the engine's dtype."""
    refuse_unrunnable_model(model)
    for field in ("weights", "attention", "cache"):
        stored = getattr(config.formats, field)
        if stored not in (None, config.dtype):
            raise ValueError(f"formats: {field} as {stored} while the engine's dtype is {config.dtype}; {PLANNED_ONLY}")
    refuse_cut(model, config)


def refuse_cut(model: ModelConfig, config: EngineConfig) -> None:
    """Raises ValueError for experts that cannot be cut as config says. That cannot be planned for either."""
    experts, ranks = model.experts, config.num_ranks
    if config.experts_cut == "inside" and experts is not None and experts.intermediate_size < ranks:
        raise ValueError(
            f"experts_cut: inside would leave some of {ranks} ranks nothing of experts whose intermediate size is "
            f"{experts.intermediate_size}; take fewer ranks or leave experts whole"
        )
