"""Work that runs beside what follows it: on a second stream of a GPU, and at once where there are no streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """What is enqueued under `run` may take place at any time from there to `join`. Each `join` is of one `run`: a
    stream that is captured cannot wait for another that it has given nothing to.

    Memory that it allocates is safe to use after `join` and dead at the next `run`, by which time everything that was
    enqueued before has happened.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def run(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
