"""How long a step takes on a device (device.py), from the work and bytes of its operations (work.py).

An operation takes the longer of its arithmetic and its memory traffic, times its kind's factor, and operation_s for
each launch. A collective takes collective_s + (N - 2) collective_hop_s and its bytes over the link. Ranks meet at
collectives: between two of them the slowest rank counts, or, where ranks share cores, all ranks' work over as many as
run at a time. What a switch moves in the background takes memory traffic from the step; the link has room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.correction import Correction
from splash_trt.scheduler.device import KINDS, Device
from splash_trt.scheduler.work import LayoutWork, matrix

PREFILL_ONLY = ("expand_kv", "mla_prefill", "mla_sparse", "context_rows", "index_choices")


@dataclass(frozen=True)
class _Rates:
    """One layout's table in seconds: per quantity, rows [ideal arithmetic; ideal memory or link; launches]."""

    table: np.ndarray
    segments: np.ndarray
    """[segments, operations]: 1 where an operation belongs to a segment."""
    count: int
    """Operations."""

    def seconds(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[operations, N]: what the roofline says, and launches."""
        y = self.table @ x
        n = self.count
        return np.maximum(y[:n], y[n : 2 * n]), y[2 * n :]


class CostModel:
    """Of one model on the ranks of one deployment. ValueError for a format that the device says nothing of."""

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
        """Seconds that the step takes, corrections included."""
        return self._predict(batch) * self.correction.factor(batch.layout, _has_prefill(batch))

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds by kind (device.KINDS); their sum is step_s without corrections."""
        out = dict.fromkeys(KINDS, 0.0)
        out["copies"] = batch.moved_bytes * self._copy_s
        if batch.num_tokens:
            for name, (ideal, launches) in self.by_operation(batch).items():
                kind = self._kinds[batch.layout][name]
                out[kind] += ideal
                out[kind if kind in ("collective", "step") else "operation"] += launches
        return out

    def by_operation(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per operation of a step with tokens: seconds of its work, and of its launches, on the ranks that count."""
        rates = self._rates[batch.layout]
        ideal, launches = rates.seconds(self.work[batch.layout].quantities.of(batch))
        weights = rates.segments.T @ self._weights(rates.segments @ (ideal + launches))
        names = [op.name for op in self.work[batch.layout].operations]
        return dict(
            zip(names, zip((ideal * weights).sum(1).tolist(), (launches * weights).sum(1).tolist(), strict=True),
                strict=True)
        )  # fmt: skip

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step of this batch took so long: predictions to come follow, slowly."""
        if batch.num_tokens and not batch.moved_bytes:
            self.correction.observe(batch.layout, _has_prefill(batch), self._predict(batch), seconds)

    def _predict(self, batch: Batch) -> float:
        copies = batch.moved_bytes * self._copy_s
        if not batch.num_tokens:
            return copies
        rates = (self._rates if batch.prefill_tokens.any() else self._decode_rates)[batch.layout]
        ideal, launches = rates.seconds(self.work[batch.layout].quantities.of(batch))
        segments = rates.segments @ (ideal + launches)
        slowest = segments.max(1)
        if self._concurrent < self._ranks:
            slowest = np.maximum(slowest, segments.mean(1) * (self._ranks / self._concurrent))
        return float(slowest.sum()) + copies

    def _weights(self, segments: np.ndarray) -> np.ndarray:
        """[segments, N]: how much each rank's time in a segment counts."""
        ranks = segments.shape[1]
        shared = self._ranks / self._concurrent
        slowest = np.zeros_like(segments)
        slowest[np.arange(len(segments)), segments.argmax(1)] = 1
        crowded = segments.mean(1) * shared > segments.max(1)
        return np.where(crowded[:, None], shared / ranks, slowest)

    @property
    def _kinds(self) -> dict[Layout, dict[str, str]]:
        return {layout: {op.name: op.kind for op in work.operations} for layout, work in self.work.items()}

    def _rates_of(self, work: LayoutWork, prefill: bool) -> _Rates:
        device = self.device
        kept = [i for i, op in enumerate(work.operations) if prefill or op.name not in PREFILL_ONLY]
        latency = device.collective_s + device.collective_hop_s * max(self._ranks - 2, 0)
        arithmetic, memory, launches = [], [], []
        for i in kept:
            op = work.operations[i]
            factor = device.factors.get(op.kind, 1.0)
            launch_s = device.operation_s * device.factors.get("operation", 1.0)
            rate = device.memory_bytes_s
            if op.kind == "collective":
                launch_s, rate = latency, device.link_bytes_s
            elif op.kind == "step":
                launch_s = device.step_s * factor
            arithmetic.append(work.flops[i] * (factor / self._flops(op.format)))
            memory.append(work.bytes[i] * (factor / rate))
            launches.append(work.launches[i] * launch_s)
            if op.kind == "experts":
                launches[-1] += matrix([{"touched": device.expert_s * op.layers}])[0]
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


def _has_prefill(batch: Batch) -> bool:
    return bool(batch.prefill_tokens.any())
