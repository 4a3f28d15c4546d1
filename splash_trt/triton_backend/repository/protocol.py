"""Messages between a local client (Triton's model) and the frontend. Encoded with msgpack; decoding runs no code.

A client's first message on every connection is Hello, which is answered by Welcome. Every message to it carries the
frontend's incarnation, so that those of a frontend that ended are dropped.
"""

from __future__ import annotations

import msgspec

VERSION = 1


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Asks for a Welcome, whose version says whether the two understand each other."""

    version: int = VERSION


class Generate(msgspec.Struct, frozen=True, tag=True):
    """One prompt to continue. `id` is the client's own and unique among its living requests."""

    id: str
    body: bytes
    """JSON with the fields of POST /v1/completions and one prompt."""
    stream: bool = True
    """False: one Event, when everything is known."""
    deadline_s: float | None = None
    """Seconds from its arrival at the frontend after which it is cancelled, with an error."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nothing more is wanted; nothing more comes."""

    id: str


ToFrontend = Hello | Generate | Cancel


class Token(msgspec.Struct, frozen=True, array_like=True):
    """logprob: natural logarithm of its probability; name: its text, or its bytes where they are no text."""

    id: int
    name: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """The likeliest tokens in its place, best first: id, name, logprob."""


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed. `status` is what HTTP would say, `param` the field of the body at fault."""

    status: int
    message: str
    param: str | None = None


class Event(msgspec.Struct, frozen=True):
    """What a request's answer grew by. After one with `finish` or `failure` nothing more comes."""

    id: str
    text: str = ""
    num_tokens: int = 0
    logprobs: tuple[Token, ...] = ()
    """Of the tokens, if the request asked for them."""
    num_prompt_tokens: int = 0
    finish: str | None = None
    """"stop" or "length"."""
    failure: Failure | None = None


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """What serves here."""

    incarnation: str
    model: str
    version: int = VERSION


class Frames(msgspec.Struct, frozen=True, tag=True):
    """At most one Event for each request."""

    incarnation: str
    events: tuple[Event, ...]


FromFrontend = Welcome | Frames

_to_frontend = msgspec.msgpack.Decoder(ToFrontend)
_from_frontend = msgspec.msgpack.Decoder(FromFrontend)
encode = msgspec.msgpack.Encoder().encode


def decode_to_frontend(data: bytes) -> ToFrontend:
    """Raises ValueError for anything that is not one of these messages."""
    try:
        return _to_frontend.decode(data)
    except RecursionError:
        raise ValueError("a message nests too deeply") from None


def decode_from_frontend(data: bytes) -> FromFrontend:
    """Raises ValueError for anything that is not one of these messages."""
    try:
        return _from_frontend.decode(data)
    except RecursionError:
        raise ValueError("a message nests too deeply") from None
