"""TensorRT plugin splash::page_transfer: copies whole cache pages from one pool into another or within one, as
reference.py."""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import math

import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.page_transfer.kernel import BLOCK
from splash_plugins.page_transfer.plugin_kernel import entry
from splash_plugins.trt_support import constants, launch, pointer

NAME = "splash::page_transfer"


def register(target: GPUTarget) -> None:
    """Inputs: source [P', …], taken, placed [n] int32 (placed -1: not copied), pool [P, …]. Output: the pool, in
    place."""

    @trtp.register(NAME)
    def describe(
        source: trtp.TensorDesc, taken: trtp.TensorDesc, placed: trtp.TensorDesc, pool: trtp.TensorDesc
    ) -> trtp.TensorDesc:
        return pool.aliased()

    @trtp.aot_impl(NAME)
    def implement(
        source: trtp.TensorDesc,
        taken: trtp.TensorDesc,
        placed: trtp.TensorDesc,
        pool: trtp.TensorDesc,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        size = math.prod(constants(pool, "pool", *range(1, len(pool.shape_expr))))
        kernel = compile_entry(entry(pointer(pool), size), target)
        return launch(kernel, [placed.shape_expr[0], -(-size // BLOCK)])
