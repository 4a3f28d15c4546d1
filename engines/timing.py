"""How long a call takes, on a CPU and on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], float]
"""From a call to the seconds that it takes."""


def cpu_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median of `repeats` calls after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def captured_seconds(call: Callable[[], Any]) -> float:
    """As gpu_seconds, of what can be captured. RuntimeError if it cannot."""
    return gpu_seconds(call, plainly=False)


def gpu_seconds(call: Callable[[], Any], repeats: int = 7, calls: int = 20, plainly: bool = True) -> float:
    """Of one call: the median over replays of a CUDA graph of `calls` calls, or where they cannot be captured, over
    plain launches. plainly: False raises RuntimeError instead."""
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
    except RuntimeError as error:  # it waits for the device or allocates by itself
        if not plainly:
            raise RuntimeError(f"it cannot be captured in a CUDA graph: {error}") from error
        return plain
    return graph.replay
