"""What the benchmarks of GPU kernels share: a result's error, and how long launches take in a CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinite if a number is finite in only one of them."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def captured(launches: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of these launches. Their kernels must have been compiled before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def median_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """The median time of a replay in microseconds, over this many replays in a row."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2] * 1e3
