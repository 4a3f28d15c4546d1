"""The control channel: rank 0 tells all ranks what to do next, in order. Implementations: control_threads, control_mpi.

Messages carry a tag and bytes (a plan as plan.encode made it, or msgpack). Nothing here is ever unpickled.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec


class Kind(enum.IntEnum):
    """What a message is."""

    PLAN = 1
    """plan.encode's bytes: execute this step."""
    STOP = 2
    """No payload: the run has ended, stop receiving."""
    OBJECT = 3
    """A small value in msgpack, such as the outputs of a finished generate()."""


@dataclass(frozen=True)
class Message:
    """One message from rank 0."""

    kind: Kind
    payload: bytes

    @property
    def value(self) -> object:
        """What an OBJECT carries."""
        assert self.kind is Kind.OBJECT, self.kind
        return msgspec.msgpack.decode(self.payload)


class Control(ABC):
    """One rank's end of the channel."""

    rank: int
    size: int

    @abstractmethod
    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Rank 0 only: sends a message to all other ranks.

        Returns before they have received it, unless some rank is several messages behind: then it waits for that rank,
        and raises RankFailure naming it if it receives none within the deadline. After STOP, it returns when every rank
        has received all messages.
        """

    @abstractmethod
    def receive(self) -> Message:
        """Ranks other than 0: the next message. Waits without a deadline, and leaves its core alone in long waits.

        Raises RankFailure, or the process ends, when rank 0 is gone.
        """

    @abstractmethod
    def agree(self, error: str | None) -> None:
        """Ends the start-up on all ranks, or fails on all: returns if every rank calls it with None.

        `error` is what went wrong on this rank, such as "ValueError: page_tokens: …". If any rank gives one, all ranks
        raise RankFailure naming such a rank and its error, without waiting for ranks that have not called yet. All
        ranks call it once, at the end of their start-up; from then on waiting for a plan has no deadline.
        """

    def progress(self) -> None:
        """Rank 0, when it idles outside of collectives: lets messages that are not yet delivered make progress."""
        return

    def settle(self) -> None:
        """Rank 0, before it waits outside of this channel for something that other ranks do: returns when they have
        received all messages. A long message makes progress only while this rank calls the channel."""
        return

    def send_object(self, value: object) -> None:
        """Rank 0 only: `send` of a value that msgpack can carry."""
        self.send(Kind.OBJECT, msgspec.msgpack.encode(value))
