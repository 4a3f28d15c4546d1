"""What a frontend knows about the other frontends that serve the same engine."""

from __future__ import annotations

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One of the frontends that serve one engine on one port; told by the process that starts them."""

    number: int
    count: int
    sockets: tuple[int, ...]
    """File descriptors that it accepts connections from."""
    folder: str
    """The folder through which they share their metrics."""
    run: str
    """An id of the run: the same for all of its frontends, another one for each run."""
    began_s: float
    """When the run began, by the monotonic clock."""
    again: bool
    """Whether it replaces one that died, in whose sockets' queues clients may wait."""

    @property
    def name(self) -> str:
        return member_name(self.number, self.count)


def member_name(number: int, count: int) -> str:
    """The frontend's name in logs."""
    return "frontend" if count == 1 else f"frontend {number}"
