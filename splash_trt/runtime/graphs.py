"""Runs a step's program: as a replayed CUDA graph where the step's shape comes again, else kernel by kernel, which
takes the host longer than all but the largest steps take the GPU.

A graph is captured per shape (shapes.py) and stays valid for good: what it reads and writes (weights, pages, block
tables, a step's arrays) lies at addresses that no switch of layouts changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from splash_trt.config import Layout
from splash_trt.plan import SAMPLE, Plan
from splash_trt.runtime.device_step import DeviceStep
from splash_trt.runtime.fast_sampler import FastSampler
from splash_trt.runtime.program import Program
from splash_trt.runtime.shapes import Shape, Shapes
from splash_trt.runtime.step_arrays import ArrayBuilder
from splash_trt.runtime.upload import Uploader


@dataclass(frozen=True)
class Forwarded:
    """What a step's forward pass gave, on the device; padding follows the W wanted rows."""

    logits: torch.Tensor
    """[W + padding, V_r]; a replayed graph's are valid until the next replay."""
    tokens: torch.Tensor | None
    """[W + padding] int64, if they were chosen here (plain sampling); else None."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: Forwarded


class Forward:
    """Captures graphs of padded steps: of likely shapes in advance (`warm_up`), of others when a shape comes for the
    second time. All ranks see the same steps, so they capture together."""

    def __init__(
        self,
        programs: dict[Layout, Program],
        builder: ArrayBuilder,
        shapes: Shapes,
        uploader: Uploader,
        sampler: FastSampler,
        last_sampled: torch.Tensor,
        logits: torch.Tensor | None,
    ) -> None:
        """logits: memory for those of the largest padded step, which all graphs write to; None: nothing is captured."""
        self._programs = programs
        self._builder = builder
        self._shapes = shapes
        self._upload = uploader
        self._sampler = sampler
        self._last_sampled = last_sampled
        self._logits = logits
        self._met: set[Shape] = set()
        self._graphs: dict[Shape, _Captured] = {}
        self._pool: Any = None

    def __call__(self, plan: Plan, plain: bool) -> Forwarded:
        """plain: all wanted tokens are sampled by temperature alone (see is_plain), so they can be chosen here."""
        host = self._builder.build(plan)
        shape = host.shape
        if self._logits is None or not host.padded:
            return self._run(self._upload(host, fixed=False), plain, None)
        if shape not in self._graphs and shape not in self._met:
            # A shape that comes only once is not worth a graph.
            self._met.add(shape)
            return self._run(self._upload(host, fixed=False), plain, None)
        step = self._upload(host, fixed=True)
        captured = self._graphs.get(shape) or self._captured(step)
        captured.graph.replay()
        # The graph always chooses tokens; where sampling is not plain, its choice is ignored and replaced.
        return captured.out if plain else replace(captured.out, tokens=None)

    def warm_up(self) -> None:
        """Captures the likely shapes before a request waits for them."""
        for layout in self._programs if self._logits is not None else ():
            for shape in self._shapes.before(layout):
                # A step of padding only: it is captured and not run.
                self._captured(self._upload(self._builder.padding(shape), fixed=True))

    def close(self) -> None:
        """Drops the graphs: NCCL waits for those that hold its work."""
        self._graphs.clear()

    def _run(self, step: DeviceStep, plain: bool, logits: torch.Tensor | None) -> Forwarded:
        found = self._programs[step.shape.layout](step, logits)
        tokens = None
        if plain:
            a = step.arrays
            tokens = self._sampler(found, a["temperature"], a["seed"], a["want_position"])
            self._last_sampled.index_copy_(0, a["want_slot"], tokens)
        return Forwarded(found, tokens)

    def _captured(self, step: DeviceStep) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel's first launch loads it, which a stricter capture does not allow.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
            out = self._run(step, True, self._logits)
        self._pool = self._pool or graph.pool()
        captured = self._graphs[step.shape] = _Captured(graph, out)
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
