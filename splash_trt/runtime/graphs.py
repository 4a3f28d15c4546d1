"""Runs a step's program: as a replayed CUDA graph where the step only decodes, else call by call.

A graph is captured per (layout, bucket) and stays valid for good: what it reads and writes (weights, pages, block
tables, a step's arrays) lies at addresses that no switch of layouts changes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splash_trt.config import Layout
from splash_trt.plan import SAMPLE, Plan
from splash_trt.runtime.device_step import DeviceStep
from splash_trt.runtime.fast_sampler import FastSampler
from splash_trt.runtime.program import Program
from splash_trt.runtime.step_arrays import ArrayBuilder, Shape
from splash_trt.runtime.upload import Uploader


def buckets_up_to(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: padding costs at most a quarter of the rows."""
    sizes, size = [1, 2, 4], 8
    while sizes[-1] < most:
        sizes += [size * part // 4 for part in ((4, 6) if size < 16 else (4, 5, 6, 7))]
        size *= 2
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True)
class Forwarded:
    """What a step's forward pass gave, on the device; padding follows the W wanted rows."""

    logits: torch.Tensor
    """[W + padding, V_r]."""
    tokens: torch.Tensor | None
    """[W + padding] int64, if they were to be chosen plainly."""
    step: DeviceStep


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: Forwarded


class Forward:
    """buckets: ascending sizes that decoding is padded to; empty: it is not. capture: what is padded is captured."""

    def __init__(
        self,
        programs: dict[Layout, Program],
        builder: ArrayBuilder,
        uploader: Uploader,
        sampler: FastSampler,
        last_sampled: torch.Tensor,
        buckets: Sequence[int],
        capture: bool,
    ) -> None:
        self._programs = programs
        self._builder = builder
        self._upload = uploader
        self._sampler = sampler
        self._last_sampled = last_sampled
        self._buckets = buckets
        self._capture = capture
        self._graphs: dict[tuple[Shape, bool], _Captured] = {}
        self._pool: Any = None

    def __call__(self, plan: Plan, plain: bool) -> Forwarded:
        """plain: every wanted token is to be chosen, by temperature alone."""
        bucket = self._bucket(plan)
        host = self._builder.build(plan, bucket)
        if bucket is None or not self._capture:
            return self._run(self._upload(host, fixed=False), plain)
        captured = self._captured(host.shape, plain)
        self._upload(host, fixed=True)
        captured.graph.replay()
        return captured.out

    def warm_up(self) -> None:
        """Captures plain decoding of every size under every layout, before a request waits for it."""
        for layout in self._programs if self._capture else ():
            for bucket in reversed(self._buckets):  # the largest first: the others live in its memory
                self._captured(self._builder.shape_of(layout, bucket), True)

    def close(self) -> None:
        """Drops the graphs: NCCL waits for those that hold its work."""
        self._graphs.clear()

    def _bucket(self, plan: Plan) -> int | None:
        if not self._buckets or not plan.absorbed.all():
            return None
        most = int(plan.counts.max())
        if most > self._buckets[-1] or len(plan.want_index) > most * len(plan.counts):
            return None
        return self._buckets[bisect.bisect_left(self._buckets, most)]

    def _run(self, step: DeviceStep, plain: bool) -> Forwarded:
        logits = self._programs[step.shape.layout](step)
        tokens = None
        if plain:
            a = step.arrays
            tokens = self._sampler(logits, a["temperature"], a["seed"], a["want_position"])
            self._last_sampled.index_copy_(0, a["want_slot"], tokens)
        return Forwarded(logits, tokens, step)

    def _captured(self, shape: Shape, plain: bool) -> _Captured:
        """The graph, captured now if it is not there yet. All ranks come here with the same shape."""
        found = self._graphs.get((shape, plain))
        if found is not None:
            return found
        # A step of nothing but padding: the run that compiles and loads every kernel must leave no trace.
        step = self._upload(self._builder.padding(shape), fixed=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(step, plain)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            out = self._run(step, plain)
        self._pool = self._pool or graph.pool()
        captured = self._graphs[shape, plain] = _Captured(graph, out)
        return captured


def is_plain(sampling: np.ndarray, target: np.ndarray) -> bool:
    """No wanted row (sampling [W] of SAMPLING_DTYPE) has a filter, a target, or wants log-probabilities."""
    return bool(
        (target == SAMPLE).all()
        and (sampling["top_k"] == 0).all()
        and (sampling["top_p"] >= 1).all()
        and (sampling["min_p"] == 0).all()
        and (sampling["logprobs"] < 0).all()
    )
