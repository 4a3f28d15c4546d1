"""Norms, latent rows, rotations and decode attention, as launched for glm-4.7-flash in bfloat16."""

from __future__ import annotations

import dataclasses

from splash_plugins.absorb.kernel import BLOCK_L, absorb_kernel
from splash_plugins.few_rows.kernel import CHUNK, PARTS, gated_kernel, linear_kernel
from splash_plugins.few_rows.parts_kernel import CHUNK as PART_CHUNK
from splash_plugins.few_rows.parts_kernel import COLUMNS, PART, parts_kernel
from splash_plugins.latent_rows.kernel import latent_rows_kernel
from splash_plugins.mla_attention.decode_kernel import (
    MANY_QUERIES,
    DecodeConfig,
    choose_config,
    decode_kernel,
)
from splash_plugins.mla_attention.decode_merge_kernel import MERGE_BLOCK, MERGE_NUMBERS, merge_kernel
from splash_plugins.norm.kernel import add_norm_kernel, norm_warps
from splash_plugins.rope_q.kernel import rope_q_kernel
from splash_plugins.value_up.kernel import BLOCK_V, merge_columns, merge_up_kernel, value_up_kernel
from splash_plugins.value_up.kernel import PARTS as PARTS_MERGED
from tests.kernels.aot import Kernel, Target, overlaps

HIDDEN, HEADS, NOPE, VALUE, LATENT, ROPE, QUERY_LATENT = 2048, 10, 192, 256, 512, 64, 768
PAGE_TOKENS = 64
# What the rest of the arguments are: bfloat16 tensors, or integers.
FLOAT32 = ("cos", "sin", "lse", "partial", "partial_lse")
INT32 = (
    "tables",
    "slot",
    "first",
    "length",
    "part",
    "read_part",
    "merged",
    "page",
    "offset",
    "target_page",
    "target_offset",
)
TENSORS = ("q", "qkv", "hidden", "delta", "weight", "out", "pages", "rows", "latent", "absorbed", "q_norm", "kv_norm",
           "w_uk", "w_uv", "latents", "x", "w", "gate_up")  # fmt: skip


def _kernel(
    function: object, constexprs: dict[str, object], overlap: bool, num_warps: int, num_stages: int = 3
) -> Kernel:
    constexprs = {**constexprs, "OVERLAP": overlap}
    types: dict[str, str] = {}
    for name in function.arg_names:  # type: ignore[attr-defined]
        if name in constexprs:
            continue
        if name in FLOAT32:
            types[name] = "*fp32"
        elif name in INT32:
            types[name] = "*i32"
        elif name in TENSORS:
            types[name] = "*bf16"
        elif name in ("eps", "scale"):
            types[name] = "fp32"
        else:
            # A page's stride in an arena of all layers is the only number that may pass 2³¹.
            types[name] = "i64" if name == "page_stride" else "i32"
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return Kernel(
        function,
        types,
        constexprs,
        options,
        tuple(n for n in types if n.endswith("_stride") or n in ("columns", "inner")),
    )


def _decode(config: DecodeConfig, none: dict[str, object], overlap: bool) -> Kernel:
    """none: the results that are not wanted."""
    attend = {"HEADS": HEADS, "LATENT": LATENT, "ROPE": ROPE, "S": PAGE_TOKENS, "BLOCK_L": 512, "BLOCK_R": 64}
    blocks = {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "PARTS": config.parts}
    return _kernel(decode_kernel, {**attend, **blocks, **none}, overlap, config.num_warps, config.num_stages)


def _wide(kernel: Kernel) -> Kernel:
    """Parts of a product are float32."""
    return dataclasses.replace(kernel, types={**kernel.types, "out": "*fp32"})


def kernels(target: Target) -> list[Kernel]:
    is_hopper = target.name == "sm_90"
    config, few_queries = (choose_config(HEADS, 2, target.shared_bytes, is_hopper, n) for n in (MANY_QUERIES, 1))
    merge = {"HEADS": HEADS, "LATENT": LATENT}
    heads = {"HEADS": 20, "NOPE": NOPE, "LATENT": LATENT, "R": ROPE, "INTERLEAVED": True}
    row = {"Q": QUERY_LATENT, "L": LATENT, "R": ROPE, "INTERLEAVED": True}
    overlap = overlaps(target)
    product = {"LATENT": LATENT, "BLOCK_A": 16}
    up = {"VALUE": VALUE, "BLOCK_L": LATENT, "BLOCK_V": BLOCK_V}
    absorb = {
        **product,
        "NOPE": NOPE,
        "R": ROPE,
        "INTERLEAVED": True,
        "BLOCK_K": 256,
        "BLOCK_L": BLOCK_L,
        "BLOCK_R": 32,
    }
    few = {"BLOCK_T": 16, "CHUNK": CHUNK, "PARTS": PARTS}
    parted = {"DEPTH": HEADS * VALUE, "WIDTH": HIDDEN, "PART": PART, "CHUNK": PART_CHUNK, "BLOCK_N": COLUMNS}
    columns = merge_columns(2 * LATENT, target.shared_bytes)
    merged = {**merge, **up, "BLOCK_V": columns, "BLOCK_A": 4, "BLOCK_S": PARTS_MERGED // 4}
    return [
        _kernel(add_norm_kernel, {"SIZE": HIDDEN, "BLOCK": HIDDEN}, overlap, norm_warps(HIDDEN)),
        _kernel(latent_rows_kernel, {**row, "BLOCK_Q": 1024, "BLOCK_L": 512, "BLOCK_R": 32}, overlap, norm_warps(1024)),
        _kernel(rope_q_kernel, {**heads, "ROWS": 64, "BLOCK_R": 32, "IN_PLACE": True}, overlap, 4),
        _decode(config, {"lse": None}, overlap),
        _decode(few_queries, {"out": None, "lse": None}, overlap),
        _kernel(merge_kernel, {**merge, "BLOCK_S": MERGE_BLOCK, "BLOCK_L": MERGE_NUMBERS // MERGE_BLOCK}, overlap, 8),
        _kernel(absorb_kernel, absorb, overlap, 4),
        _kernel(value_up_kernel, {**product, **up}, overlap, 4),
        _kernel(merge_up_kernel, merged, overlap, 8),
        _kernel(linear_kernel, {**few, "DEPTH": HIDDEN, "BLOCK_N": 16, "depth_stride": 1}, overlap, PARTS),
        _kernel(linear_kernel, {**few, "DEPTH": HEADS * VALUE, "BLOCK_N": 16, "column_stride": 1}, overlap, PARTS),
        _wide(_kernel(parts_kernel, {**parted, "BLOCK_T": 16}, overlap, 8)),
        _kernel(gated_kernel, {**few, "DEPTH": HIDDEN, "BLOCK_N": 8}, overlap, PARTS),
    ]
