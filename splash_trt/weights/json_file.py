"""Reads a JSON object from a file that is not trusted: size, encoding, form and repeated keys are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The object in the file. ValueError names the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{path}: is larger than {max_bytes} bytes, the most that is read of such a file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    except ValueError as error:  # a repeated key, NaN, an integer of thousands of digits
        raise ValueError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        # Parsers differ in which of the two they take, so it is unknown which is meant.
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
