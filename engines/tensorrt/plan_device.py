"""What the runtime for plans needs of CUDA, and torch's way to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

SCRATCH_ALIGN = 256  # bytes, which TensorRT asks of an execution context's memory
T = TypeVar("T")


class Mark(Protocol):
    """A place in a stream's work."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Until everything before it has happened."""
        ...


class Device(Protocol):
    def stream(self) -> int:
        """The handle of the stream that a step runs on now."""
        ...

    def capturing(self) -> bool:
        """What is enqueued now does not happen: it becomes part of a graph."""
        ...

    def mark(self) -> Mark:
        """After what was enqueued on the stream so far."""
        ...

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Memory on the device, uint8, that begins at a multiple of SCRATCH_ALIGN."""
        ...

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """(what replays the step's launches, what the step returned, which each replay fills).

        The step runs twice: once to make and load what it needs, once for the graph. Before that all work has ended.
        """
        ...


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """The current CUDA device and torch's current stream, which should not be the default one: TensorRT would wait for
    the whole device around each network."""

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self) -> Mark:
        return _Event()

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")  # torch aligns by 512

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()  # torch waits for the device before it captures
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = step()
        return graph.replay, found
