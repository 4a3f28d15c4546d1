"""Measures how long a call takes, on a CPU or on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], float]
"""Takes a call and returns the seconds that it takes."""


def cpu_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of `repeats` calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def captured_seconds(call: Callable[[], Any]) -> float:
    """As gpu_seconds, but a RuntimeError if the call cannot be captured."""
    return gpu_seconds(call, plainly=False)


def gpu_seconds(call: Callable[[], Any], repeats: int = 7, calls: int = 20, plainly: bool = True) -> float:
    """The time of one call: the median over `repeats` - 1 replays of a CUDA graph of `calls` calls. If they cannot be
    captured, plain launches are timed, or with plainly=False RuntimeError is raised."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        run = _captured(call, calls, stream, plainly)
        taken = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3 / calls)
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(taken[1:])


def _captured(call: Callable[[], Any], calls: int, stream: torch.cuda.Stream, plainly: bool) -> Callable[[], Any]:
    def plain() -> None:
        for _ in range(calls):
            call()

    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            plain()
    except RuntimeError as error:  # the call waits for the device, or allocates without torch
        if not plainly:
            raise RuntimeError(f"it cannot be captured in a CUDA graph: {error}") from error
        return plain
    return graph.replay
