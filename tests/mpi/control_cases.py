"""What every implementation of Control must do; run on all ranks of a world."""

from __future__ import annotations

from splash_trt.dist.control import Kind
from splash_trt.dist.world import World

# Empty, short, and too long to leave before the other side takes it; more of them than may lie waiting.
SENT = [[int(Kind.PLAN), number * 1000] for number in (0, 1, 300, 2, 500, 0, 3, 4)]


def send_and_receive(world: World) -> list[list[int]]:
    """The kind and length of each message received; the last is a STOP."""
    received = []
    if world.rank == 0:
        for kind, length in SENT:
            world.control.send(Kind(kind), bytes([length % 251]) * length)
        world.control.send(Kind.STOP)
        return []
    while (message := world.control.receive()).kind is not Kind.STOP:
        assert set(message.payload) <= {len(message.payload) % 251}
        received.append([int(message.kind), len(message.payload)])
    return received


def broadcast(world: World, value: object) -> object:
    """What each rank gets of rank 0's `value`."""
    if world.rank == 0:
        world.control.send_object(value)
        return value
    return world.control.receive().value
