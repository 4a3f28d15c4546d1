"""How long a step takes on a device (device.py), from the work and bytes of its operations (work.py)."""

from __future__ import annotations

from splash_trt.config import EngineConfig
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.device import Device


class CostModel:
    """Of one model on the ranks of one deployment."""

    def __init__(self, model: ModelConfig, config: EngineConfig, device: Device) -> None: ...

    def step_s(self, batch: Batch) -> float:
        """Seconds that the step takes, corrections included."""
        raise NotImplementedError

    def parts(self, batch: Batch) -> dict[str, float]:
        """Seconds by kind (device.KINDS); their sum is step_s without corrections."""
        raise NotImplementedError
