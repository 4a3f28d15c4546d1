"""What a frontend is told of the others that serve the same engine."""

from __future__ import annotations

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One of the frontends that serve one engine on one port, as the process that started them tells it."""

    number: int
    count: int
    sockets: tuple[int, ...]
    """File descriptors that it accepts connections from."""
    folder: str
    """Where they leave their counts for each other."""
    run: str
    """The same for all of them, and another one for each run."""
    began_s: float
    """When the run began, by the monotonic clock."""
    again: bool
    """It takes another's place, whose clients wait."""

    @property
    def name(self) -> str:
        return member_name(self.number, self.count)


def member_name(number: int, count: int) -> str:
    """In logs and metrics."""
    return "frontend" if count == 1 else f"frontend {number}"
