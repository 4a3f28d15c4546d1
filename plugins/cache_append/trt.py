"""TensorRT plugin splash::cache_append: writes new cache rows into their pages, as reference.py's append_rows."""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.cache_append.plugin_kernel import entry
from splash_plugins.trt_support import constants, launch, pointer

NAME = "splash::cache_append"


def register(target: GPUTarget) -> None:
    """Inputs: pool [P, layers, S, W], rows [T, W], page, offset [T] int32 (page -1: not written). Output: the pool, in
    place."""

    @trtp.register(NAME)
    def describe(
        pool: trtp.TensorDesc, rows: trtp.TensorDesc, page: trtp.TensorDesc, offset: trtp.TensorDesc, layer: int
    ) -> trtp.TensorDesc:
        return pool.aliased()

    @trtp.aot_impl(NAME)
    def implement(
        pool: trtp.TensorDesc,
        rows: trtp.TensorDesc,
        page: trtp.TensorDesc,
        offset: trtp.TensorDesc,
        layer: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        layers, page_tokens, width = constants(pool, "pool", 1, 2, 3)
        kernel = compile_entry(entry(pointer(pool), (layers, page_tokens, width), layer), target)
        return launch(kernel, [rows.shape_expr[0]])
