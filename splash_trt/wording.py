"""What people read: messages of a bearable length, and numbers with the digits that mean something."""

from __future__ import annotations

from typing import Any

DIGITS = 4
"""Of times and forecasts: the clock and the cost model are not as good as that."""


def shortened(message: str, *, most: int, end: int) -> str:
    """At most `most` characters of a message, which may quote what it is about. A long one loses its middle, and keeps
    its beginning, which names the field, and its last `end` characters, which have the remedy."""
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
