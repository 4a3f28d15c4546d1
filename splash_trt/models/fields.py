"""Reads fields of given types from a JSON object of a model's configuration; errors name the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

MAX_SIZE = 2**31 - 1

_MISSING: Any = object()


def _shown(value: Any) -> str:
    """The value for an error message, cut short: a configuration may hold anything."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """The fields of one JSON object.

    where: the file's name for messages; prefix: the path of the object in the file, e.g. "rope_scaling.".
    The readers raise ValueError for a value of the wrong type or outside its range, and for a missing field that has
    no default.
    """

    def __init__(self, data: Mapping[str, Any], *, where: str, prefix: str = "") -> None:
        self.data = data
        self.where = where
        self.prefix = prefix

    def fail(self, key: str, message: str) -> NoReturn:
        raise ValueError(f"{self.where}: {self.prefix}{key} {message}")

    def wrong(self, key: str, allowed: str) -> NoReturn:
        """Raises ValueError: the field's value is not allowed."""
        self.fail(key, f"is {_shown(self.data.get(key))}; it must be {allowed}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(key) is not None

    def _get(self, key: str, default: Any, allowed: str) -> Any:
        value = self.data.get(key, default)
        if value is _MISSING:
            self.fail(key, f"is missing; it must be {allowed}")
        return value

    def size(self, key: str, default: int = _MISSING, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number from low to high."""
        allowed = f"a whole number from {low} to {high}"
        value = self._get(key, default, allowed)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(key, allowed)
        return value

    def number(self, key: str, default: float = _MISSING, *, low: float = 0.0, above: bool = True) -> float:
        """A finite number greater than low (not above: or equal to it)."""
        allowed = f"a finite number {'greater than' if above else 'of at least'} {low:g}"
        value = self._get(key, default, allowed)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.wrong(key, allowed)
        try:
            value = float(value)
        except OverflowError:
            self.wrong(key, allowed)
        if not math.isfinite(value) or value < low or (above and value == low):
            self.wrong(key, allowed)
        return value

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str = _MISSING) -> str:
        """One of the allowed words; null counts as missing."""
        words = ", ".join(repr(word) for word in allowed)
        value = self._get(key, default, f"one of {words}")
        if value is None and default is not _MISSING:
            value = default
        if not isinstance(value, str) or value not in allowed:
            self.wrong(key, f"one of {words}")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested object; None if it is missing, null or empty."""
        value = self.data.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.wrong(key, "an object or null")
        return Fields(value, where=self.where, prefix=f"{self.prefix}{key}.")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Raises ValueError for a field not in `known` that is set (not null, false, 0 or empty): it may matter."""
        for key, value in self.data.items():
            if key not in known and value:
                self.fail(
                    key,
                    f"is set to {_shown(value)}, which is not supported: ignoring it might compute another model. "
                    "Remove it from the file if it has no effect on the model",
                )
