"""Makes messages and numbers readable: limits the length of messages, and the digits of numbers."""

from __future__ import annotations

from typing import Any

DIGITS = 4
"""Significant digits of times and forecasts, which are not more precise than that."""


def shortened(message: str, *, most: int, end: int) -> str:
    """A message cut to at most `most` characters, as it may quote an input of any length. The middle is left out: the
    beginning names the field, and the last `end` characters have the remedy."""
    if len(message) <= most:
        return message
    return f"{message[: most - end - 3]} … {message[-end:]}"


def rounded(value: Any) -> Any:
    """Plain values (of a JSON document) with each float to DIGITS significant digits; all others as they are."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
