"""Copies a host array to the device without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """On a CPU a view of the array; on a GPU a copy, which is enqueued. It goes by way of pinned memory: from other
    memory the host would have to wait for everything that the GPU has still to do."""
    x = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)
