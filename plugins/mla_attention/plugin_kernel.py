"""The absorbed (decode) attention kernel with the arguments that TensorRT passes. The pool is [P, layers, S, W].

Contexts are not split. A context that is to be computed in parts is passed as several queries, with `first` and
`length` of each part, and lse_merge follows.
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
    """What to compile. pool: (layers, S, W). Grid: queries times `blocks_of_heads`; the scalar is the number of columns
    of tables."""
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
    """How many programs one query has: one for each block of heads."""
    return int(-(-entry.constexprs["HEADS"] // entry.constexprs["BLOCK_H"]))
