"""l2_fetch, which only NVIDIA's GPUs from compute capability 9.0 on can."""

from __future__ import annotations

from splash_plugins.l2_fetch.kernel import BLOCK, fetch_kernel
from tests.kernels.aot import Kernel, Target, overlaps


def kernels(target: Target) -> list[Kernel]:
    if not overlaps(target):
        return []
    return [Kernel(fetch_kernel, {"pieces": "*i64", "count": "i32"}, {"BLOCK": BLOCK}, {"num_warps": 1})]
