"""Where tensors come from, as the weight store sees it: a checkpoint's folder, random numbers, later a built engine."""

from __future__ import annotations

from typing import Protocol

import torch

from splash_trt.models.config import ModelConfig
from splash_trt.weights.spec import TensorSpec


class WeightSource(Protocol):
    """Gives parts of a model's tensors in the engine's names and forms (weights/spec.py)."""

    model: ModelConfig

    def read(self, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        """Write rows [begin, end) of the tensor along spec.axis into `out` (that shape; its dtype is converted to).

        Reads no more of the file than those rows need where the file's form allows. ValueError names a tensor that
        is missing or has another shape than the model's configuration says.
        """
        ...
