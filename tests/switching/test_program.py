"""Switching changes no token, also where steps are padded as on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from splash_trt.config import Layout
from splash_trt.request import Request
from tests.device_ranks import device_ranks
from tests.switching.harness import Told, assert_same
from tests.switching.test_sameness import CASES, HEALTH, PHASES, Event, serve


@settings(max_examples=8, derandomize=True, deadline=None, database=None, phases=PHASES, suppress_health_check=HEALTH)
@given(**CASES)
def test_drawn_schedules(
    folder: Path, requests: list[Request], expected: dict[str, Told], ranks: int, layout: Layout, spare: int,
    config: dict[str, Any], events: list[Event],
) -> None:  # fmt: skip
    with device_ranks((2, 4, 7, 16)):
        assert_same(serve(folder, requests, ranks, layout, spare, config, events).told, expected)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=250, derandomize=True, deadline=None, database=None, phases=PHASES, suppress_health_check=HEALTH)
@given(**CASES)
def test_many_drawn_schedules(
    folder: Path, requests: list[Request], expected: dict[str, Told], ranks: int, layout: Layout, spare: int,
    config: dict[str, Any], events: list[Event],
) -> None:  # fmt: skip
    with device_ranks((2, 4, 7, 16)):
        assert_same(serve(folder, requests, ranks, layout, spare, config, events).told, expected)
