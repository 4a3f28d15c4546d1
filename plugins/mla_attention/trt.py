"""splash::mla_attention: absorbed queries against paged latent rows. As decode_reference.py."""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import tensorrt as trt
import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.mla_attention.plugin_kernel import blocks_of_heads, entry
from splash_plugins.trt_support import constants, launch, pointer

NAME = "splash::mla_attention"


def register(target: GPUTarget) -> None:
    """q [A, H, W], pool [P, layers, S, W], tables [slots, C], slot, first, length [A] int32; out [A, H, L] as q,
    lse [A, H] float32."""

    @trtp.register(NAME)
    def describe(
        q: trtp.TensorDesc,
        pool: trtp.TensorDesc,
        tables: trtp.TensorDesc,
        slot: trtp.TensorDesc,
        first: trtp.TensorDesc,
        length: trtp.TensorDesc,
        layer: int,
        stride: int,
        latent: int,
        scale: float,
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
        queries, heads, _ = q.shape_expr
        return (
            trtp.from_shape_expr((queries, heads, latent), q.dtype),
            trtp.from_shape_expr((queries, heads), trt.float32),
        )

    @trtp.aot_impl(NAME)
    def implement(
        q: trtp.TensorDesc,
        pool: trtp.TensorDesc,
        tables: trtp.TensorDesc,
        slot: trtp.TensorDesc,
        first: trtp.TensorDesc,
        length: trtp.TensorDesc,
        layer: int,
        stride: int,
        latent: int,
        scale: float,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        (heads,) = constants(q, "q", 1)
        layers, page_tokens, width = constants(pool, "pool", 1, 2, 3)
        made = entry(
            pointer(q),
            heads,
            (layers, page_tokens, width),
            latent=latent,
            layer=layer,
            stride=stride,
            scale=scale,
            item_bytes=4 if q.dtype == trt.float32 else 2,
            target=target,
        )
        grid = q.shape_expr[0] * blocks_of_heads(made)
        return launch(compile_entry(made, target), [grid], [tables.shape_expr[1]])
