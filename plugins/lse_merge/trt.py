"""TensorRT plugin splash::lse_merge: merges attention over parts of a context by log-sum-exp, as reference.py."""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import tensorrt as trt
import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.lse_merge.plugin_kernel import entry
from splash_plugins.trt_support import constants, launch

NAME = "splash::lse_merge"


def register(target: GPUTarget) -> None:
    """Inputs: outs [K, n, H, d], lses [K, n, H]. Outputs: out [n, H, d], lse [n, H]. All float32."""

    @trtp.register(NAME)
    def describe(outs: trtp.TensorDesc, lses: trtp.TensorDesc) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
        _, queries, heads, size = outs.shape_expr
        return (
            trtp.from_shape_expr((queries, heads, size), trt.float32),
            trtp.from_shape_expr((queries, heads), trt.float32),
        )

    @trtp.aot_impl(NAME)
    def implement(
        outs: trtp.TensorDesc, lses: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc], tactic: int
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        parts, heads, size = constants(outs, "outs", 0, 2, 3)
        rows = outs.shape_expr[1] * heads
        return launch(compile_entry(entry(parts, size), target), [rows], [rows])
