"""Fits a device's factors and times to measured steps, by non-negative least squares on relative errors.

A predicted time is a sum of maxima of sums of what is fitted. So it is homogeneous of degree one in that, and equals
the sum of its shares (CostModel.shares); the fit finds a scale for each share. Which rank, or which side of a roofline,
is the maximum may change with the scales, so the fit is repeated for a few rounds. Each scale is drawn a little towards
1, so that what no step depends on stays as it was described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from splash_trt.config import EngineConfig
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import SHARES, CostModel
from splash_trt.scheduler.device import Device

ROUNDS = 6
PULL = 0.05
"""The weight of a scale's distance from 1, relative to that of one step's relative error."""
LEAST = 1e-3
"""The least scale: from 0, a share could not grow again in a later round."""
TOLERATED = 0.3
"""Steps with a larger relative error get less weight: on a shared machine some medians were disturbed."""


@dataclass(frozen=True)
class Sample:
    """One measured step."""

    batch: Batch
    seconds: float
    """The median over rounds."""


def fit(model: ModelConfig, config: EngineConfig, device: Device, samples: Sequence[Sample]) -> Device:
    """`device` with the times and factors that fit the samples best."""
    measured = np.array([sample.seconds for sample in samples])
    total = np.ones(len(SHARES))
    fitted = device
    for _ in range(ROUNDS):
        cost = CostModel(model, config, fitted)
        shares = np.array([[cost.shares(sample.batch)[name] for name in SHARES] for sample in samples])
        relative = shares / measured[:, None]
        error = np.abs(relative.sum(1) - 1)
        weight = np.sqrt(np.minimum(1.0, TOLERATED / np.maximum(error, 1e-9)))
        pulls = np.full(len(SHARES), PULL)
        rows = np.concatenate([relative / total * weight[:, None], np.diag(pulls)])
        total = np.maximum(nnls(rows, np.append(weight, pulls)), LEAST)
        fitted = scaled(device, dict(zip(SHARES, total.tolist(), strict=True)))
    return fitted


def nnls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |a x - b|: the active-set method of Lawson and Hanson (Solving Least Squares Problems,
    1974, chapter 23). a [m, n] of full rank, b [m]."""
    n = a.shape[1]
    x, free = np.zeros(n), np.zeros(n, np.bool_)
    for _ in range(3 * n):
        gradient = a.T @ (b - a @ x)
        gradient[free] = 0
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        while True:
            wished = np.zeros(n)
            wished[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (wished <= 0)
            if not below.any():
                x = wished
                break
            step = (x[below] / (x[below] - wished[below])).min()
            x = x + step * (wished - x)
            free &= x > 1e-12
            x[~free] = 0
    return x


def scaled(device: Device, scale: dict[str, float]) -> Device:
    """The device with each share of a step's time multiplied by its entry in `scale`."""
    times = {name: getattr(device, name) * scale[name] for name in ("operation_s", "expert_s", "step_s")}
    collective = {name: getattr(device, name) * scale["collective_s"] for name in ("collective_s", "collective_hop_s")}
    kinds = {name for name in SHARES if not name.endswith("_s")}
    factors = dict(device.factors) | {kind: device.factors.get(kind, 1.0) * scale[kind] for kind in sorted(kinds)}
    return replace(device, **times, **collective, factors=factors)


def errors(model: ModelConfig, config: EngineConfig, device: Device, samples: Sequence[Sample]) -> np.ndarray:
    """Signed relative errors of the predictions: 0.1 means that the prediction is 10 % too long."""
    cost = CostModel(model, config, device)
    return np.array([cost.step_s(sample.batch) / sample.seconds - 1 for sample in samples])
