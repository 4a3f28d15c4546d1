"""One table of flags: what `splash-trt serve` is told reaches the frontend's process word for word."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from splash_trt.frontend.options import FLAGS, HttpSettings, as_flags, http_options, parse, take_settings

REQUIRED = ["--engine", "ipc:///x", "--model-name", "m"]
CHANGED = HttpSettings(
    max_queued=7,
    max_body_bytes=1000,
    ready_deadline_s=1.5,
    shutdown_deadline_s=2.5,
    api_key_file="/a file",
    api_key_for_metrics=True,
    tool_parser="glm",
    reasoning_parser="none",
    generation_config="none",
)


@pytest.mark.parametrize("settings", [HttpSettings(), CHANGED, HttpSettings(api_key="k")])
def test_flags_say_what_the_settings_say(settings: HttpSettings) -> None:
    parsed = parse([*REQUIRED, *as_flags(settings)])
    assert all(getattr(parsed, field) == getattr(settings, field) for field in HttpSettings.__struct_fields__)
    taken: list[HttpSettings] = []

    @click.command()
    @http_options
    def command(**fields: Any) -> None:
        taken.append(take_settings(fields))
        assert not fields

    result = CliRunner().invoke(command, as_flags(settings))
    assert result.exit_code == 0 and taken == [settings], result.output


def test_every_setting_has_a_flag() -> None:
    assert {flag.field for flag in FLAGS} == set(HttpSettings.__struct_fields__)
    assert as_flags(HttpSettings()) == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_queued": 0}, "max_queued"),
        ({"shutdown_deadline_s": -1.0}, "shutdown_deadline_s"),
        ({"shutdown_deadline_s": float("inf")}, "shutdown_deadline_s: inf .* at most 1000000"),
        ({"ready_deadline_s": float("nan")}, "ready_deadline_s: nan .* above 0"),
        ({"tool_parser": "xml"}, "one of auto, deepseek_v3, glm, none"),
        ({"generation_config": "mine"}, "generation_config"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        HttpSettings(**fields)
