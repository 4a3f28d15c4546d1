"""EngineConfig: each field's range, and what a refusal says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from splash_trt.config import DTYPES, EngineConfig, Formats, Layout

RANGES = {
    "num_ranks": (1, 1024),
    "memory_bytes": (1, 1 << 50),
    "page_tokens": (1, 4096),
    "max_running": (1, 1 << 16),
    "absorbed_tokens": (1, 1 << 20),
    "dop_absorbed_tokens": (1, 1 << 20),
    "context_block_tokens": (1, 1 << 20),
    "plans_in_flight": (1, 2),
}


def _config(**values: Any) -> EngineConfig:
    return EngineConfig(**{"max_batch_tokens": 1 << 20, **values})


@pytest.mark.parametrize("field", RANGES)
def test_both_ends_of_a_range_are_allowed_and_no_more(field: str) -> None:
    low, high = RANGES[field]
    for value in (low, high):
        assert getattr(_config(**{field: value}), field) == value
    optional = () if field == "context_block_tokens" else (None,)
    for wrong in (low - 1, high + 1, -1, 2.5, "8", *optional):
        with pytest.raises(ValueError) as caught:
            _config(**{field: wrong})
        text = str(caught.value)
        assert text.startswith(f"{field}: {wrong!r}") and str(low) in text and str(high) in text


def test_operators() -> None:
    assert EngineConfig().operators == "auto" and EngineConfig(operators="own").operators == "own"
    with pytest.raises(ValueError, match="^operators: 'none' is not one of auto, own$"):
        EngineConfig(operators="none")


def test_cuts_of_experts() -> None:
    assert EngineConfig().experts_cut == "whole" and EngineConfig(experts_cut="inside").experts_cut == "inside"
    with pytest.raises(ValueError, match="^experts_cut: 'rows' is not one of whole, inside$"):
        EngineConfig(experts_cut="rows")


def test_the_context_block_follows_the_steps_on_gpus() -> None:
    assert _config().context_block == 1024
    assert _config(context_block_tokens=7, run_on="gpu").context_block == 7
    assert _config(max_batch_tokens=8192, run_on="gpu").context_block == 16384
    assert EngineConfig(max_batch_tokens=300, run_on="gpu").context_block == 1024


@pytest.mark.parametrize("wrong", [0, (1 << 20) + 1, 1.5])
def test_max_batch_tokens(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_batch_tokens: "):
        EngineConfig(max_batch_tokens=wrong, max_running=1)


def test_every_running_request_has_room_for_a_token() -> None:
    assert EngineConfig(max_batch_tokens=7, max_running=7).max_running == 7
    with pytest.raises(ValueError, match="max_batch_tokens: 6 is below max_running .7.*raise max_batch_tokens"):
        EngineConfig(max_batch_tokens=6, max_running=7)


@pytest.mark.parametrize("wrong", [0, -5])
def test_max_context(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"max_context: {wrong} "):
        EngineConfig(max_context=wrong)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
def test_step_deadline(wrong: float) -> None:
    with pytest.raises(ValueError, match="step_deadline_s: "):
        EngineConfig(step_deadline_s=wrong)


def test_dtypes_and_their_sizes() -> None:
    assert {dtype: EngineConfig(dtype=dtype).itemsize for dtype in DTYPES} == {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
    }
    with pytest.raises(ValueError, match="dtype: 'int8' is not one of float64, float32, bfloat16"):
        EngineConfig(dtype="int8")


def test_short_names_of_formats() -> None:
    config = EngineConfig(dtype="bf16", formats=Formats(cache="bf16", weights="fp8"))
    assert config == EngineConfig(dtype="bfloat16", formats=Formats(cache="bfloat16", weights="fp8"))
    assert config.itemsize == 2
    with pytest.raises(ValueError, match="^formats.cache: 'bf8' is not one of float64, "):
        Formats(cache="bf8")


def test_the_context_is_the_models_or_less() -> None:
    assert EngineConfig().context_of(4096) == 4096
    assert EngineConfig(max_context=100).context_of(4096) == 100
    assert EngineConfig(max_context=10_000).context_of(4096) == 4096


def test_layouts_by_name() -> None:
    assert [Layout.parse(name) for name in ("tp", "DP", "Cp", "dop")] == list(Layout)
    with pytest.raises(ValueError, match="layout: 'ep' is not one of tp, dp, cp, dop"):
        Layout.parse("ep")


def test_it_is_frozen_and_keyword_only() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_ranks = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig(2)  # type: ignore[misc]
