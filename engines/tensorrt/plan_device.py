"""What plan_runtime.py needs of a device, as a protocol, and its implementation for CUDA with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

SCRATCH_ALIGN = 256  # bytes; TensorRT requires it of an execution context's memory
T = TypeVar("T")


class Mark(Protocol):
    """A point in a stream's work, such as a CUDA event."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Waits until everything before it is done."""
        ...


class Device(Protocol):
    def stream(self) -> int:
        """The handle of the current stream."""
        ...

    def capturing(self) -> bool:
        """Whether work that is enqueued now is captured in a graph, and not run."""
        ...

    def mark(self) -> Mark:
        """A mark after all that has been enqueued on the stream so far."""
        ...

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Memory on the device, uint8, whose address is a multiple of SCRATCH_ALIGN."""
        ...

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """(a function that replays the step's launches; what the step returned, which each replay fills anew).

        The step is called twice: once to create and load what it needs, and once to be captured, when all work on the
        device has ended.
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
    """The current CUDA device and torch's current stream. This should not be the default stream, with which TensorRT
    would synchronise the device around each network."""

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self) -> Mark:
        return _Event()

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")  # torch aligns to 512 bytes

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()  # torch waits for the device before it captures
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = step()
        return graph.replay, found
