"""Messages between a frontend and rank 0. Encoded with msgpack; decoding never runs code.

Every message to the frontend carries the engine's incarnation, so that frames of an engine that died are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from splash_trt.request import Request, TokenDelta


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request. number: the client's own number for it, by which Frames may name it; None: only by its id."""

    request: Request
    number: int | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class SetLayout(msgspec.Struct, frozen=True, tag=True):
    """An operator asks for a layout ("tp", "dp", "cp", "dop"), and with `pin` to stay there; or to go back to "auto".

    Answered by a LayoutReply with the same `token`.
    """

    token: int
    layout: str
    pin: bool = False


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Asks why the layout is what it is; answered by an Explanation with the same `token`."""

    token: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish the requests at hand (drain) or drop them, then end."""

    drain: bool = True


Totals = dict[tuple[str, ...], float]
"""What an engine has counted since its start, by name and labels: see Frames.counts."""

ToEngine = Submit | Cancel | SetLayout | Explain | Shutdown


class LayoutCapacity(msgspec.Struct, frozen=True):
    """Cache tokens that a layout holds; total: distinct tokens over all ranks, request: of the longest request."""

    per_rank: tuple[int, ...]
    total: int
    request: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine's first message, and its answer whenever a frontend connects: what it serves."""

    incarnation: str
    vocab_size: int
    max_context: int
    """Longest prompt + output in tokens: the model's and the cache's limits taken together."""
    eos_token_ids: tuple[int, ...]
    num_ranks: int
    layouts: tuple[str, ...]
    """Those that the deployment may use."""
    capacity: dict[str, LayoutCapacity]


class Status(msgspec.Struct, frozen=True):
    """How things stand after a step."""

    layout: str
    epoch: int
    switch: str
    """State of the switch: "steady" or the state under way (layout/switch.py)."""
    switch_target: str | None
    switch_progress: float
    """Share of the cache rows that had to move which have moved, 0 to 1."""
    mode: str
    """"auto", or "pinned" by an operator or by the deployment's one layout."""
    running: int
    waiting: int
    running_by_rank: tuple[int, ...]
    """By owner or home."""
    used_tokens: tuple[int, ...]
    """Cache tokens held on each rank, in whole pages."""
    total_tokens: tuple[int, ...]
    """Cache tokens that each rank holds at most."""


class Decided(msgspec.Struct, frozen=True):
    """The policy asked for another layout."""

    source: str
    target: str
    kind: str
    """The reason as one word of a few."""


class Frames(msgspec.Struct, frozen=True, tag=True):
    """All news of one step for one frontend: at most one message a step."""

    incarnation: str
    step: int
    num_tokens: int
    """Computed in the step, prompt and output together."""
    seconds: float
    """What the step took."""
    status: Status
    deltas: tuple[TokenDelta, ...] = ()
    layout: str = ""
    """The layout that the step ran in; the status may have the next one already."""
    preemptions: int = 0
    """Requests that were preempted since the last such message."""
    decision: Decided | None = None
    numbers: tuple[int, ...] = ()
    """Requests whose only news is one more token; they are not among `deltas`."""
    tokens: tuple[int, ...] = ()
    """The tokens of `numbers`, in the same order."""
    num_elsewhere: int = 0
    """Output tokens of this step that went to other frontends' requests."""
    totals: Totals | None = None
    """With the first of a connection: `counts` of all before, added up."""

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.tokens):
            raise ValueError(f"tokens: {len(self.tokens)} for {len(self.numbers)} numbers")

    @property
    def counts(self) -> Totals:
        """What it adds to the engine's totals. sizes: steps by their tokens, rounded up to a power of two."""
        counts: Totals = {}
        if self.num_tokens:
            layout = self.layout or self.status.layout
            counts["sizes", str(1 << (self.num_tokens - 1).bit_length())] = 1
            counts["steps", layout] = 1
            counts["tokens", layout] = self.num_tokens
            counts["seconds", layout] = self.seconds
        if self.preemptions:
            counts["preemptions",] = self.preemptions
        if self.decision is not None:
            counts["decisions", self.decision.source, self.decision.target, self.decision.kind] = 1
        return counts

    @property
    def num_output(self) -> int:
        """Output tokens that the step brought, to whichever frontend."""
        return len(self.tokens) + sum(len(delta.tokens) for delta in self.deltas) + self.num_elsewhere


class SwitchReport(msgspec.Struct, frozen=True, tag=True):
    """A switch began or ended. `record` is layout/switch.py's Record as plain values; `number` names the switch.

    is_past: the report is old, and repeated for a frontend that connected after it.
    """

    incarnation: str
    number: int
    record: dict[str, object]
    is_past: bool = False


class LayoutReply(msgspec.Struct, frozen=True, tag=True):
    """`error` says why a SetLayout was refused; None: accepted, which is not yet done."""

    incarnation: str
    token: int
    error: str | None = None


class Explanation(msgspec.Struct, frozen=True, tag=True):
    """What the policy saw, which layouts it compared and what it decided, as plain values for people to read."""

    incarnation: str
    token: int
    report: dict[str, object]


FromEngine = Ready | Frames | SwitchReport | LayoutReply | Explanation

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder().encode


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises ValueError for anything that is not one of these messages."""
    try:
        return _to_engine.decode(data)
    except RecursionError:
        raise ValueError("a message nests too deeply") from None


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises ValueError for anything that is not one of these messages."""
    try:
        return _from_engine.decode(data)
    except RecursionError:
        raise ValueError("a message nests too deeply") from None


def in_columns(
    deltas: Iterable[tuple[int | None, TokenDelta]],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[TokenDelta, ...]]:
    """Frames' `numbers`, `tokens` and `deltas` for the deltas of a step, at most one for each request.

    deltas: each with its request's number. Most deltas are one token of a request that goes on: these go into the two
    columns, since a TokenDelta takes ten times as long to encode and to decode.
    """
    numbers, tokens, others = [], [], []
    for number, delta in deltas:
        if number is not None and len(delta.tokens) == 1 and delta == TokenDelta(delta.request_id, delta.tokens):
            numbers.append(number)
            tokens.append(delta.tokens[0])
        else:
            others.append(delta)
    return tuple(numbers), tuple(tokens), tuple(others)


def all_deltas(frames: Frames, ids: Mapping[int, str]) -> Iterator[TokenDelta]:
    """The inverse of `in_columns`. ids: {number: request id}; tokens of other numbers are left out."""
    for number, token in zip(frames.numbers, frames.tokens, strict=True):
        request_id = ids.get(number)
        if request_id is not None:
            yield TokenDelta(request_id, (token,))
    yield from frames.deltas
