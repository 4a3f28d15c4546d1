"""A second CUDA stream for work that may overlap with what follows it; on a CPU that work is done at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work that is enqueued inside `with run():` may overlap with what is enqueued after it, until `join`. Call `join`
    once after each `run`: while a graph is captured, a stream cannot wait for one that has been given no work.

    Memory that is allocated inside `run` may be used after `join`, until the next `run`.
    """

    def __init__(self, device: torch.device) -> None:
        """There are two side streams. Kernels on the urgent one (True) start before others that wait for a free
        multiprocessor."""
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
