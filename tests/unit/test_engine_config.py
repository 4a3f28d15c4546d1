"""EngineConfig: values that would fail later, far from who gave them, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from splash_trt.config import EngineConfig, Layout


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", "tp"),
        ("layout", 1),
        ("layouts", ("dp",)),
        ("layouts", (Layout.DP, None)),
        *[(name, value) for name in ("step_deadline_s", "switch_deadline_s") for value in (0, -1.0, 1e7)],
        *[(name, float(text)) for name in ("step_deadline_s", "switch_deadline_s") for text in ("inf", "nan")],
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    wrong: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field}: "):
        EngineConfig(**wrong)


def test_layouts_are_each_once_and_in_order() -> None:
    config = EngineConfig(layout=Layout.CP, layouts=(Layout.DOP, Layout.TP, Layout.CP))
    assert config.allowed_layouts == (Layout.TP, Layout.CP, Layout.DOP)
