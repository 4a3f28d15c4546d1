"""Absorbed (decode) attention as TensorRT calls it. The pool is [P, layers, S, W]; a context is not split.

A context that is to be attended to in parts is given as several queries, with `first` and `length` of each part, and
lse_merge after it.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import Entry, shared_bytes_of
from splash_plugins.mla_attention.decode_kernel import choose_config, decode_kernel

HOPPER = 90


@triton.jit
def mla_attention_plugin(
    q, pool, tables, slot, first, length, columns, out, lse,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LAYERS: tl.constexpr, LAYER: tl.constexpr,
    S: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = LATENT + ROPE
    decode_kernel(
        q=q, q_stride=HEADS * WIDTH, q_head_stride=WIDTH,
        pages=pool + LAYER * S * WIDTH, page_stride=LAYERS * S * WIDTH, row_stride=WIDTH,
        tables=tables, table_stride=columns, slot=slot, first=first, length=length,
        part=None, stride=STRIDE, scale=SCALE,
        out=out, out_stride=HEADS * LATENT, out_head_stride=LATENT,
        lse=lse, lse_stride=HEADS, partial=None, partial_lse=None,
        HEADS=HEADS, LATENT=LATENT, ROPE=ROPE, S=S,
        BLOCK_H=BLOCK_H, BLOCK_L=BLOCK_L, BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, OVERLAP=False,
    )  # fmt: skip


def entry(
    dtype: str,
    heads: int,
    pool: tuple[int, int, int],
    *,
    latent: int,
    layer: int,
    stride: int,
    scale: float,
    item_bytes: int,
    target: GPUTarget,
) -> Entry:
    """pool: (layers, S, W). Grid: queries times blocks of heads (`blocks_of_heads`); the scalar is tables' columns."""
    layers, page_tokens, width = pool
    config = choose_config(heads, item_bytes, shared_bytes_of(target), target.arch == HOPPER)
    return Entry(
        function=mla_attention_plugin,
        inputs={"q": dtype, "pool": dtype, "tables": "*i32", "slot": "*i32", "first": "*i32", "length": "*i32"},
        scalars=("columns",),
        outputs={"out": dtype, "lse": "*fp32"},
        constexprs={
            "HEADS": heads,
            "LATENT": latent,
            "ROPE": width - latent,
            "LAYERS": layers,
            "LAYER": layer,
            "S": page_tokens,
            "STRIDE": stride,
            "SCALE": scale,
            "BLOCK_H": config.block_h,
            "BLOCK_L": max(16, triton.next_power_of_2(latent)),
            "BLOCK_R": max(16, triton.next_power_of_2(width - latent)),
            "BLOCK_N": config.block_n,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def blocks_of_heads(entry: Entry) -> int:
    """Programs of one query."""
    return int(-(-entry.constexprs["HEADS"] // entry.constexprs["BLOCK_H"]))
