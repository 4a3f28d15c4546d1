"""Host arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """On a CPU the array's own memory; else a copy that is enqueued, from pinned memory: from any other, the host would
    wait for all that the device still has to do."""
    x = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)
