"""The expanded (prefill) attention kernel with the arguments that TensorRT passes. It is for one block of context rows;
lse_merge merges the results for several."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import Entry, shared_bytes_of
from splash_plugins.mla_attention.prefill_kernel import (
    HEAD_GROUP,
    LOG2_E,
    _prefill_kernel,
    choose_blocks,
    pad,
    split_nope,
)
from splash_plugins.mla_attention.tiles import PREFILL_TILE


@triton.jit
def mla_prefill_plugin(
    q, position, rows, k_nope, v, segments, tiles, num_tiles, out, lse,
    HEADS: tl.constexpr, NOPE: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr,
    ROPE: tl.constexpr, WIDTH: tl.constexpr, VD: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _prefill_kernel(
        q=q, position=position, keys=k_nope, keys_tail=k_nope, key_ropes=rows + (WIDTH - R), values=v, value_data=v,
        segments=segments, tiles=tiles, out=out, lse=lse, num_tiles=num_tiles, heads=HEADS, scale=SCALE,
        q_stride=HEADS * (NOPE + R), q_head=NOPE + R, key_stride=HEADS * NOPE, key_head=NOPE, rope_stride=WIDTH,
        value_stride=HEADS * VD, value_head=VD, out_stride=HEADS * VD, out_head=VD, lse_stride=HEADS, lse_head=1,
        NOPE=NOPE, HEAD=HEAD, TAIL=TAIL, R=R, ROPE=ROPE, VD=VD, VALUE=VALUE, TILE=TILE,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUP=GROUP, TMA=False, HAS_LSE=True, MERGE=False, PRECISION=PRECISION,
    )  # fmt: skip


def entry(
    dtype: str, heads: int, nope: int, rope: int, vd: int, width: int, scale: float, item_bytes: int, target: GPUTarget
) -> Entry:
    """What to compile. Grid: number of tiles times `programs_of_a_tile`; the scalar is the number of tiles."""
    blocks = choose_blocks(nope, rope, vd, item_bytes, shared_bytes_of(target), False)
    head, tail = split_nope(nope)
    return Entry(
        function=mla_prefill_plugin,
        inputs={
            "q": dtype,
            "position": "*i32",
            "rows": dtype,
            "k_nope": dtype,
            "v": dtype,
            "segments": "*i32",
            "tiles": "*i32",
        },
        scalars=("num_tiles",),
        outputs={"out": dtype, "lse": "*fp32"},
        constexprs={
            "HEADS": heads,
            "NOPE": nope,
            "HEAD": head,
            "TAIL": tail,
            "R": rope,
            "ROPE": pad(rope),
            "WIDTH": width,
            "VD": vd,
            "VALUE": pad(vd),
            "SCALE": scale * LOG2_E,
            "TILE": PREFILL_TILE,
            "BLOCK_M": blocks.block_m,
            "BLOCK_N": blocks.block_n,
            "GROUP": HEAD_GROUP,
            "PRECISION": "ieee" if dtype == "*fp32" else "tf32",
        },
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def programs_of_a_tile(entry: Entry) -> int:
    return int(entry.constexprs["TILE"] // entry.constexprs["BLOCK_M"] * entry.constexprs["HEADS"])
