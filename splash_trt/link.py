"""Messages between a frontend and rank 0. Encoded with msgpack; decoding never runs code.

Every message to the frontend carries the engine's incarnation, so that frames of an engine that died are dropped.
"""

from __future__ import annotations

import msgspec

from splash_trt.request import Request, TokenDelta


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class SetLayout(msgspec.Struct, frozen=True, tag=True):
    """An operator's word: go to `layout` ("tp", "dp", "cp", "dop"), or back to "auto"; `pin` keeps it there."""

    layout: str
    pin: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish the requests at hand (drain) or drop them, then end."""

    drain: bool = True


ToEngine = Submit | Cancel | SetLayout | Shutdown


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine's first message: what it serves."""

    incarnation: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    num_ranks: int


class Frames(msgspec.Struct, frozen=True, tag=True):
    """All that one step has to tell: at most one message a step."""

    incarnation: str
    step: int
    epoch: int
    layout: str
    running: int
    waiting: int
    deltas: tuple[TokenDelta, ...] = ()


FromEngine = Ready | Frames

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder().encode


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.ValidationError (a ValueError) for anything that is not one of these messages."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.ValidationError (a ValueError) for anything that is not one of these messages."""
    return _from_engine.decode(data)
