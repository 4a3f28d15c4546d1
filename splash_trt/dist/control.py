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
    """No payload: the run has ended, leave."""
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
        """Rank 0 only: gives a message to all other ranks.

        Returns before they have taken it, unless some rank is several messages behind. Raises RankFailure naming that
        rank if it takes none within the deadline. After STOP, returns when every rank has taken all messages.
        """

    @abstractmethod
    def receive(self) -> Message:
        """Ranks other than 0: the next message. Waits without a deadline and without using its core.

        Raises RankFailure, or the process ends, when rank 0 is gone.
        """

    @abstractmethod
    def agree(self, error: str | None) -> None:
        """All or none: returns on every rank if every rank calls it with None.

        `error` is what went wrong here, such as "ValueError: page_tokens: …". If any rank gives one, all ranks raise
        RankFailure naming the first such rank and its error, without waiting for ranks that have not called yet. All
        ranks call it once, at the end of their start-up; from then on they may idle as long as they like.
        """

    def progress(self) -> None:
        """Rank 0, when it idles outside collectives: lets messages that are still on their way go on."""
        return

    def settle(self) -> None:
        """Rank 0, before it waits for something that other ranks have to do first, outside this channel: returns when
        they have taken all messages, since a long one travels only while this rank looks after it."""
        return

    def send_object(self, value: object) -> None:
        """Rank 0 only: `send` of a value that msgpack can carry."""
        self.send(Kind.OBJECT, msgspec.msgpack.encode(value))
