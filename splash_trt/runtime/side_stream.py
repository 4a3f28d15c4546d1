"""A second CUDA stream for work that may overlap with what follows it; on a CPU that work is done at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """What is enqueued under `run` may take place at any time from there to `join`. Each `join` is of one `run`: a
    stream that is captured cannot wait for another that it has given nothing to.

    Memory that it allocates is safe to use after `join` and dead at the next `run`, by which time everything that was
    enqueued before has happened.
    """

    def __init__(self, device: torch.device) -> None:
        """A stream for what is urgent (True), whose programs start before those of others that wait for room, and one
        for what is not."""
        cuda = device.type == "cuda"
        self._streams = {u: torch.cuda.Stream(device, priority=-int(u)) for u in (False, True)} if cuda else {}
        self._used = False

    @contextmanager
    def run(self, urgent: bool = False) -> Iterator[None]:
        self._used = urgent
        if not self._streams:
            yield
            return
        stream = self._streams[urgent]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        if self._streams:
            torch.cuda.current_stream().wait_stream(self._streams[self._used])
