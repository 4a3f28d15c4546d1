"""TensorRT plugins. splash::mla_attention: attention of absorbed queries to paged latent rows, as decode_reference.py;
splash::mla_prefill: attention of expanded queries to one block of context rows, as prefill_reference.py."""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import tensorrt as trt
import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.mla_attention import plugin_prefill_kernel
from splash_plugins.mla_attention.plugin_kernel import blocks_of_heads, entry
from splash_plugins.trt_support import constants, item_bytes, launch, pointer

NAME = "splash::mla_attention"
PREFILL = "splash::mla_prefill"


def register(target: GPUTarget) -> None:
    """H heads on this rank (h in an expanded block of heads), L latent, R rope part, W = L + R; pages of S rows, a
    block table of C pages for each request."""
    _register_decode(target)
    _register_prefill(target)


def _register_decode(target: GPUTarget) -> None:
    """Inputs: q [A, H, W], pool [P, layers, S, W], tables [slots, C], slot, first, length [A] int32. Outputs: out
    [A, H, L] of q's dtype, lse [A, H] float32."""

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
            item_bytes=item_bytes(q),
            target=target,
        )
        grid = q.shape_expr[0] * blocks_of_heads(made)
        return launch(compile_entry(made, target), [grid], [tables.shape_expr[1]])


def _register_prefill(target: GPUTarget) -> None:
    """Inputs: q [E, h, nope + R], position [E] int32, rows [C, W], k_nope [C, h, nope], v [C, h, vd], segments [S, 5]
    and tiles [n, 2] int32 (as prefill_kernel.prefill has them; here C and S count context rows and segments). Outputs:
    out [E, h, vd] of q's dtype, lse [E, h] float32, both undefined for queries in no tile."""

    @trtp.register(PREFILL)
    def describe(
        q: trtp.TensorDesc,
        position: trtp.TensorDesc,
        rows: trtp.TensorDesc,
        k_nope: trtp.TensorDesc,
        v: trtp.TensorDesc,
        segments: trtp.TensorDesc,
        tiles: trtp.TensorDesc,
        scale: float,
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
        queries, heads, _ = q.shape_expr
        return (
            trtp.from_shape_expr((queries, heads, v.shape_expr[2]), q.dtype),
            trtp.from_shape_expr((queries, heads), trt.float32),
        )

    @trtp.aot_impl(PREFILL)
    def implement(
        q: trtp.TensorDesc,
        position: trtp.TensorDesc,
        rows: trtp.TensorDesc,
        k_nope: trtp.TensorDesc,
        v: trtp.TensorDesc,
        segments: trtp.TensorDesc,
        tiles: trtp.TensorDesc,
        scale: float,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        heads, depth = constants(q, "q", 1, 2)
        (nope,), (vd,) = constants(k_nope, "k_nope", 2), constants(v, "v", 2)
        (width,) = constants(rows, "rows", 1)
        made = plugin_prefill_kernel.entry(
            pointer(q), heads, nope, depth - nope, vd, width, scale, item_bytes(q), target
        )  # fmt: skip
        count = tiles.shape_expr[0]
        grid = count * plugin_prefill_kernel.programs_of_a_tile(made)
        return launch(compile_entry(made, target), [grid], [count])
