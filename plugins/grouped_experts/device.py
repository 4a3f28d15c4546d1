"""What a device offers to Triton kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.runtime import driver

from splash_plugins.grouped_experts.tiles import Device

INTERPRETED = Device(processors=2, shared_bytes=227 * 1024, tma=True)


@lru_cache(maxsize=64)
def limits(device: torch.device) -> Device:
    """The device's limits; INTERPRETED for a CPU, where Triton's interpreter runs kernels."""
    if device.type == "cpu":
        return INTERPRETED
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties = driver.active.utils.get_device_properties(index)
    tma = torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)
    return Device(processors=properties["multiprocessor_count"], shared_bytes=properties["max_shared_mem"], tma=tma)
