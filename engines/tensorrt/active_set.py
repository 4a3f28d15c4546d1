"""Holds the engines of the layout that is being served. A swap between two steps sets one reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Swappable(Protocol):
    def activate(self) -> None: ...

    def retire(self) -> None: ...


Set = TypeVar("Set", bound=Swappable)


class ActiveSet(Generic[Set]):
    """The set of engines that steps run on. A step reads the reference once; a swap sets it between steps."""

    def __init__(self, first: Set) -> None:
        self._active = first
        self._in_step = False

    @contextmanager
    def step(self) -> Iterator[Set]:
        """The active set, which stays the same during the step."""
        assert not self._in_step, "a step inside a step"
        self._in_step = True
        try:
            yield self._active
        finally:
            self._in_step = False

    def swap(self, to: Set) -> Set:
        """To be called between steps: the next step runs on `to`. Returns the old set, which is retired."""
        assert not self._in_step, "engines are swapped between steps"
        before, self._active = self._active, to
        before.retire()
        to.activate()
        return before
