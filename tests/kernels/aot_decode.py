"""Norms, latent rows, rotations and decode attention, as launched for glm-4.7-flash in bfloat16."""

from __future__ import annotations

from splash_plugins.norm.kernel import add_norm_kernel, norm_warps
from tests.kernels.aot import Kernel, Target


def _norm() -> Kernel:
    return Kernel(
        add_norm_kernel,
        types={
            "hidden": "*bf16",
            "hidden_stride": "i32",
            "delta": "*bf16",
            "delta_stride": "i32",
            "weight": "*bf16",
            "eps": "fp32",
            "out": "*bf16",
            "out_stride": "i32",
        },
        constexprs={"SIZE": 2048, "BLOCK": 2048},
        options={"num_warps": norm_warps(2048)},
        aligned=("hidden_stride", "delta_stride", "out_stride"),
    )


def kernels(target: Target) -> list[Kernel]:
    return [_norm()]
