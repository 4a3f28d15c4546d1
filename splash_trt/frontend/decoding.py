"""Decodes JSON bodies into the protocol's types; mistakes become ApiErrors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from splash_trt.frontend.errors import ApiError

Body = TypeVar("Body", bound=msgspec.Struct)
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_AT_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"(?:unknown|missing required) field `(.*?)`")


def decode(data: bytes, body: type[Body]) -> Body:
    """The JSON text as a `body`, or an ApiError naming the field at fault."""
    try:
        return msgspec.json.decode(data, type=body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        param = _last_key_before(data, _fault_position(data, str(error)))
        where = f"{param}: " if param else "body: "
        raise ApiError(f"{where}this is not JSON in UTF-8: {error}", param=param, code="invalid_json") from None
    except RecursionError:
        raise ApiError("body: the JSON is nested too deeply", code="invalid_json") from None


def _invalid(message: str) -> ApiError:
    path, unknown = _AT_PATH.search(message), _UNKNOWN.search(message)
    parts = [path[1].replace("[...]", "")] if path and path[1] else []
    parts += [unknown[1]] if unknown else []
    param = ".".join(parts) or None
    what = message[: path.start()] if path else message
    return ApiError(f"{param or 'body'}: {what}", param=param)


def _fault_position(data: bytes, message: str) -> int:
    """The byte at which decoding failed; the end if it is not known."""
    at = _AT_BYTE.search(message)
    if at:
        return int(at[1])
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def _last_key_before(data: bytes, position: int) -> str | None:
    """The last key before `position`, to name the field at fault. Searches only 4 KiB, since prompts may be long."""
    keys = _KEY.findall(data[max(0, position - 4096) : position])
    return keys[-1].decode(errors="replace")[:64] if keys else None
