"""The least time that a step could take (roofline): what it must compute, read and send, at measured hardware rates.

It counts the same work as the cost model (splash_trt/scheduler/work.py), but without launches, inefficiencies and the
host: an operation takes the longer of its arithmetic and its memory traffic. Collectives keep their latency.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.device import Device


def bare(device: Device) -> Device:
    """The device without overheads: no factors, and no times except for work and for the latency of collectives."""
    return dataclasses.replace(
        device, factors={}, operation_s=0.0, step_s=0.0, expert_s=0.0, padded=False, concurrent_ranks=None
    )


class Floor:
    """The least times of a model's steps on ranks of this device."""

    def __init__(self, model: ModelConfig, config: EngineConfig, device: Device) -> None:
        self._model, self._ranks = model, config.num_ranks
        self._costs = CostModel(model, config, bare(device))

    def decode_ms(self, layout: Layout, batch: int, context: int) -> float:
        """A step that decodes one token for each of `batch` requests, spread evenly over ranks, with `context` tokens
        each."""
        tokens = np.bincount(np.arange(batch) % self._ranks, minlength=self._ranks).astype(np.float64)
        zeros = np.zeros(self._ranks)
        step = Batch(
            layout=layout,
            decode_tokens=tokens,
            decode_context=tokens * context,
            prefill_tokens=zeros,
            prefill_pairs=zeros,
            prefill_context=zeros,
            sampled=batch,
        )
        return 1e3 * self._costs.step_s(step)

    def prefill_ms(self, layout: Layout, tokens: int) -> float:
        """A step that prefills one prompt of `tokens` tokens."""
        first = np.zeros(self._ranks)
        first[0] = 1.0
        step = Batch(
            layout=layout,
            decode_tokens=np.zeros(self._ranks),
            decode_context=np.zeros(self._ranks),
            prefill_tokens=first * tokens,
            prefill_pairs=first * tokens * (tokens + 1) / 2,
            prefill_context=first * tokens,
            sampled=1,
            prefill_rows=1,
        )
        return 1e3 * self._costs.step_s(step)

    def experts_hit(self, batch: int) -> float:
        """The expected number of distinct experts of a layer that `batch` tokens use together, for uniform routing."""
        experts = self._model.experts
        if experts is None:
            return 0.0
        return experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** batch)
