"""Formats numbers for people to read; None becomes "-"."""

from __future__ import annotations

NONE = "-"


def count(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def short(value: float | None) -> str:
    """In thousands, millions, …: 1.2 k, 34 M."""
    if value is None:
        return NONE
    units = ["", " k", " M", " G", " T"]
    while abs(value) >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    unit = units[0]
    return f"{value:.1f}{unit}" if unit and abs(value) < 100 else f"{value:.0f}{unit}"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return NONE
    return f"{short(num_bytes)}{' B' if abs(num_bytes) < 1000 else 'B'}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.1:
        return f"{seconds * 1000:.{1 if abs(seconds) < 0.01 else 0}f} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 100 else f"{seconds:.0f} s"


def signed(seconds: float | None) -> str:
    return NONE if seconds is None else f"{'+' if seconds > 0 else ''}{duration(seconds)}"


def percent(share: float | None) -> str:
    if share is None:
        return NONE
    value = share * 100
    return f"{value:.{1 if 0 < abs(value) < 1 else 0}f} %"
