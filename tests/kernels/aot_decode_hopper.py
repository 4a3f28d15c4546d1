"""Hopper's own decode attention, as launched for glm-4.7-flash and deepseek-v3."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from splash_plugins.mla_attention.cut import BLOCK_HEADS, TILE_ROWS
from splash_plugins.mla_attention.decode_hopper_kernel import MOST_HEADS, decode_hopper_kernel
from splash_plugins.mla_attention.decode_hopper_wide_kernel import NUM_WARPS, WIDE_ROWS, decode_hopper_wide_kernel
from splash_plugins.mla_attention.decode_parts_kernel import ROPE
from tests.kernels.aot import Kernel, Target
from tests.kernels.aot_prefill import GluonKernel

LATENT = 512
# Heads, dtype, rows a page, what is written besides parts, stages
CASES = (
    (10, "bf16", 64, (), 2),
    (10, "bf16", 64, ("out",), 1),
    (16, "fp16", 128, ("out",), 1),
    (20, "bf16", 64, ("out", "lse"), 2),
    (32, "bf16", 64, ("out",), 1),
    (64, "bf16", 64, (), 2),
    (80, "fp16", 128, ("out",), 2),
    (128, "bf16", 64, ("out", "lse"), 2),
)
STRIDES = (
    "q_stride",
    "q_head_stride",
    "page_stride",
    "row_stride",
    "out_stride",
    "out_head_stride",
)


def decode_kernel(heads: int, dtype: str, page_tokens: int, written: tuple[str, ...], stages: int) -> Kernel:
    few = heads <= MOST_HEADS
    layout = repr(NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
    types = {"pages": f"*{dtype}", "scale": "fp32", "partial": "*fp32", "partial_lse": "*fp32"}
    if few:
        types["q"] = f"*{dtype}"
        blocks = {"latent_rows": (TILE_ROWS, LATENT), "rope_rows": (TILE_ROWS, ROPE)}
    else:
        blocks = {"latent_rows": (WIDE_ROWS, LATENT // 2), "rope_rows": (WIDE_ROWS, ROPE)}
        blocks |= {"q_latent_heads": (BLOCK_HEADS, LATENT // 2), "q_rope_heads": (BLOCK_HEADS, ROPE)}
    for name, (rows, columns) in blocks.items():
        types[name] = f"tensordesc<{dtype}[1, {rows}, {columns}],{layout}>"
    types |= dict.fromkeys(("tables", "slot", "first", "length", "part"), "*i32")
    constexprs: dict[str, Any] = {"HEADS": heads, "LATENT": LATENT, "S": page_tokens, "OVERLAP": True}
    kernel = decode_hopper_kernel if few else decode_hopper_wide_kernel
    if few:
        constexprs |= {"BLOCK_H": 16 if heads <= 16 else MOST_HEADS, "STAGES": stages}
    for name, kind in (("out", f"*{dtype}"), ("lse", "*fp32")):
        if name in written:
            types[name] = kind
        else:
            constexprs[name] = None
    rest = [name for name in kernel.arg_names if name not in types and name not in constexprs]
    types |= {name: "i64" if name == "page_stride" else "i32" for name in rest}
    return GluonKernel(kernel, types, constexprs, {"num_warps": 4 if few else NUM_WARPS}, STRIDES)


def kernels(target: Target) -> list[Kernel]:
    return [decode_kernel(*case) for case in CASES] if target.name == "sm_90" else []
