"""Predicts how long a step takes on a device (device.py), from the work and bytes of its operations (work.py).

An operation takes the longer of its arithmetic and its memory traffic, times its kind's factor, plus operation_s for
each launch. A collective takes collective_s + (N - 2) collective_hop_s plus its bytes over the link. Ranks wait for
each other at collectives. Between two of them the slowest rank's time counts; where ranks share cores, it is at least
the work of all ranks over the number of ranks that run at a time. What a switch moves in the background takes memory
bandwidth from the step; the link is taken to have room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.correction import Correction
from splash_trt.scheduler.device import KINDS, Device
from splash_trt.scheduler.quantities import Sums
from splash_trt.scheduler.work import EXPERT_LOOP, LayoutWork, Operation

MANY = 64.0
"""Tokens of a decode step whose time is dominated by memory traffic."""
PREFILL_ONLY = ("expand_kv", "mla_prefill", "mla_sparse", "context_rows", "index_choices")
_KIND_OF = {"collective_s": "collective", "operation_s": "operation", "expert_s": "operation", "step_s": "step"}
SHARES = (*(kind for kind in KINDS if kind not in ("operation", "step")), *_KIND_OF)
"""The parts of a step's time that calibration can tell apart."""


@dataclass(frozen=True)
class _Rates:
    """One layout's operations in seconds per quantity: rows are [arithmetic; memory or link; launches] of each."""

    table: np.ndarray
    segments: np.ndarray
    """[segments, operations]: 1 where an operation belongs to a segment."""
    count: int
    """Operations."""

    def seconds(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[operations, N] each: seconds of work by the roofline, and of launches."""
        y = self.table.dot(x)
        n = self.count
        return np.maximum(y[:n], y[n : 2 * n]), y[2 * n :]

    def by_segment(self, x: np.ndarray) -> np.ndarray:
        """[segments, N]: seconds of each rank in each segment (see Operation.segment)."""
        ideal, launches = self.seconds(x)
        return self.segments.dot(ideal + launches)


class CostModel:
    """For one model on the ranks of one deployment. ValueError for a format that the device has no figure for."""

    def __init__(self, model: ModelConfig, config: EngineConfig, device: Device) -> None:
        self.device = device
        self.correction = Correction()
        self._ranks = config.num_ranks
        self._concurrent = float(min(device.concurrent_ranks or config.num_ranks, config.num_ranks))
        self._copy_s = device.factors.get("copies", 1.0) / device.memory_bytes_s
        self.work = {layout: LayoutWork(model, config, layout, padded=device.padded) for layout in Layout}
        self._rates = {layout: self._rates_of(work, True) for layout, work in self.work.items()}
        self._decode_rates = {layout: self._rates_of(work, False) for layout, work in self.work.items()}

    def step_s(self, batch: Batch) -> float:
        """Seconds that the step takes, with corrections."""
        sums = self.work[batch.layout].quantities.sums(batch)
        return self._predict(batch, sums) * self.correction.factor(batch.layout, _decoding(sums))

    def copies_s(self, num_bytes: float, layout: Layout) -> float:
        """By how many seconds background copies lengthen decode steps; num_bytes: sent and received by the busiest
        rank."""
        return num_bytes * self._copy_s * self.correction.factor(layout, MANY)

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds by kind (device.KINDS); their sum is step_s without corrections."""
        out = dict.fromkeys(KINDS, 0.0)
        for name, seconds in self.shares(batch).items():
            out[_KIND_OF.get(name, name)] += seconds
        return out

    def shares(self, batch: Batch) -> dict[str, float]:
        """Seconds by what they are proportional to: the kinds whose factors scale work, and the device's own times."""
        out = dict.fromkeys(SHARES, 0.0)
        out["copies"] = batch.moved_bytes * self._copy_s
        if batch.num_tokens:
            operations = {op.name: op for op in self.work[batch.layout].operations}
            for name, (ideal, launches) in self.by_operation(batch).items():
                op = operations[name]
                if ideal:
                    out[op.kind] += ideal
                out[_launch_time(op)] += launches
        return out

    def by_operation(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """For each operation of a step with tokens: seconds of its work and of its launches, as far as they count."""
        rates = self._rates[batch.layout]
        quantities = self.work[batch.layout].quantities
        ideal, launches = rates.seconds(quantities.of(batch, quantities.sums(batch)))
        weights = rates.segments.T @ self._weights(rates.segments @ (ideal + launches))
        names = [op.name for op in self.work[batch.layout].operations]
        seconds = zip((ideal * weights).sum(1).tolist(), (launches * weights).sum(1).tolist(), strict=True)
        return dict(zip(names, seconds, strict=True))

    def observe(self, batch: Batch, seconds: float) -> float:
        """A step of this batch took so many seconds: later predictions follow, slowly. Returns this batch's."""
        sums = self.work[batch.layout].quantities.sums(batch)
        predicted, decoding = self._predict(batch, sums), _decoding(sums)
        if sums.tokens and not batch.moved_bytes:
            self.correction.observe(batch.layout, decoding, predicted, seconds)
        return predicted * self.correction.factor(batch.layout, decoding)

    def _predict(self, batch: Batch, sums: Sums) -> float:
        copies = batch.moved_bytes * self._copy_s
        if not sums.tokens:
            return copies
        rates = (self._rates if sums.prefill else self._decode_rates)[batch.layout]
        segments = rates.by_segment(self.work[batch.layout].quantities.of(batch, sums))
        slowest = np.maximum.reduce(segments, 1)
        if self._concurrent < self._ranks:
            slowest = np.maximum(slowest, segments.mean(1) * (self._ranks / self._concurrent))
        return float(np.add.reduce(slowest)) + copies

    def _weights(self, segments: np.ndarray) -> np.ndarray:
        """[segments, N]: the weight of each rank's time in a segment; their weighted sum is the step's time."""
        ranks = segments.shape[1]
        shared = self._ranks / self._concurrent
        slowest = np.zeros_like(segments)
        slowest[np.arange(len(segments)), segments.argmax(1)] = 1
        crowded = segments.mean(1) * shared > segments.max(1)
        return np.where(crowded[:, None], shared / ranks, slowest)

    def _rates_of(self, work: LayoutWork, prefill: bool) -> _Rates:
        device = self.device
        kept = [i for i, op in enumerate(work.operations) if prefill or op.name not in PREFILL_ONLY]
        times = {
            "collective_s": device.collective_s + device.collective_hop_s * max(self._ranks - 2, 0),
            "operation_s": device.operation_s * device.factors.get("operation", 1.0),
            "expert_s": device.expert_s,
            "step_s": device.step_s * device.factors.get("step", 1.0),
        }
        arithmetic, memory, launches = [], [], []
        for i in kept:
            op = work.operations[i]
            factor = device.factors.get(op.kind, 1.0)
            rate = device.link_bytes_s if op.kind == "collective" else device.memory_bytes_s
            arithmetic.append(work.flops[i] * (factor / self._flops(op.format)))
            memory.append(work.bytes[i] * (factor / rate))
            launches.append(work.launches[i] * times[_launch_time(op)])
        names = list(dict.fromkeys(work.operations[i].segment for i in kept))
        segments = np.zeros((len(names), len(kept)))
        for column, i in enumerate(kept):
            segments[names.index(work.operations[i].segment), column] = 1
        return _Rates(np.concatenate([arithmetic, memory, launches]), segments, len(kept))

    def _flops(self, format: str) -> float:
        if not format:
            return 1.0
        rate = self.device.flops.get(format)
        if rate is None:
            raise ValueError(
                f"device: {self.device.name} has no figure for {format} arithmetic; add flops.{format} to its "
                "description or use another format"
            )
        return rate


def _decoding(sums: Sums) -> float | None:
    """Tokens of a step that only decodes; None where it has prefill."""
    return None if sums.prefill else sums.decode


def _launch_time(op: Operation) -> str:
    """The device's time for one of the operation's launches."""
    if op.name == EXPERT_LOOP:
        return "expert_s"
    return f"{op.kind}_s" if op.kind in ("collective", "step") else "operation_s"
