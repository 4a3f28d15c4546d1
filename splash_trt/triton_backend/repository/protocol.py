"""Messages between a local client (Triton's model) and the frontend. Encoded with msgpack; decoding runs no code.

A client's first message on every connection is Hello, to which Welcome is the answer. Every message to a client has the
frontend's incarnation, so that the client can drop messages of a frontend that has ended.
"""

from __future__ import annotations

import msgspec

VERSION = 1


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Asks for a Welcome, whose version tells the client whether the two understand each other."""

    version: int = VERSION


class Generate(msgspec.Struct, frozen=True, tag=True):
    """One prompt to continue. The client chooses `id`, unique among its requests that have not ended."""

    id: str
    body: bytes
    """JSON with the fields of POST /v1/completions and one prompt."""
    stream: bool = True
    """False: there is a single Event, at the end."""
    deadline_s: float | None = None
    """Seconds from its arrival at the frontend after which it is cancelled, with an error."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancels a request: no further event of it comes."""

    id: str


ToFrontend = Hello | Generate | Cancel


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token. name: its text, or its bytes if they are not valid UTF-8; logprob: natural log of its probability."""

    id: int
    name: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """The likeliest tokens in its place, best first: id, name, logprob."""


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed. status: an HTTP status; param: the field of the body at fault."""

    status: int
    message: str
    param: str | None = None


class Event(msgspec.Struct, frozen=True):
    """More of a request's answer. One with `finish` or `failure` is the last."""

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
    """Which model is served, and by which start of the frontend."""

    incarnation: str
    model: str
    version: int = VERSION


class Frames(msgspec.Struct, frozen=True, tag=True):
    """Events, at most one for each request."""

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
