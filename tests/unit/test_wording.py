"""Messages are cut to a length, and numbers are rounded to their significant digits."""

from __future__ import annotations

import math

from splash_trt.wording import rounded, shortened


def test_a_long_message_keeps_both_ends() -> None:
    assert shortened("field: short", most=12, end=4) == "field: short"
    text = shortened(f"field: {'x' * 1000}; remedy", most=40, end=8)
    assert text == "field: xxxxxxxxxxxxxxxxxxxxxx … ; remedy" and len(text) == 40


def test_floats_lose_the_digits_that_mean_nothing() -> None:
    report = {"step_s": 0.028325502993, "phases": [{"seconds": 123456.78}, (1.0, -2.00049)], "bytes": 4325376}
    assert rounded(report) == {"step_s": 0.02833, "phases": [{"seconds": 123500.0}, [1.0, -2.0]], "bytes": 4325376}
    assert rounded([True, None, "0.123456", 0.0, math.inf]) == [True, None, "0.123456", 0.0, math.inf]
    assert math.isnan(rounded(math.nan)) and rounded(True) is True
