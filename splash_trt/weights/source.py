"""The interface of what weights are loaded from: a checkpoint, random numbers, or a built engine."""

from __future__ import annotations

from typing import Protocol

import torch

from splash_trt.models.config import ModelConfig
from splash_trt.weights.spec import TensorSpec


class WeightSource(Protocol):
    """Gives parts of a model's tensors, by the engine's names and in its shapes (weights/spec.py)."""

    model: ModelConfig

    def read(self, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        """Write rows [begin, end) of the tensor along spec.axis into `out`, which has their shape, in out's dtype.

        Reads only these rows from the file if its format allows. ValueError names a tensor that is missing or has
        another shape than the model's configuration says.
        """
        ...
