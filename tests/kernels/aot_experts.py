"""Router, routed experts, activation and embedding, as launched for glm-4.7-flash in bfloat16 on two ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splash_plugins.embed.kernel import embed_kernel
from splash_plugins.grouped_experts.few_kernel import few_down_kernel, few_gate_up_kernel
from splash_plugins.grouped_experts.gather_kernel import gather_kernel
from splash_plugins.grouped_experts.product_kernel import combine_kernel, down_kernel, gate_up_kernel
from splash_plugins.grouped_experts.sort_kernel import count_kernel, place_kernel
from splash_plugins.grouped_experts.tiles import TABLE, Device, Tiles, fit
from splash_plugins.router.kernel import choose_kernel, partial_kernel, route_kernel
from splash_plugins.router.tiles import NARROW, WIDE, Form, choose_tiles
from splash_plugins.silu_mul.kernel import silu_mul_kernel
from tests.kernels.aot import Kernel, Target, overlaps

HIDDEN, INNER, TOP_K, EXPERTS, LOCAL, TOKENS = 2048, 1536, 4, 64, 32, 16
INT32 = ("choice", "counts", "pairs", "ends", "blocks", "num_blocks", "num_tokens", "place", "ids", "slot")
FLOAT32 = ("weight", "bias", "partial")
BFLOAT16 = ("x", "router", "gate_up", "down", "hidden", "out", "y", "addend", "table", "rows")
OTHER = {"last_sampled": "*i64", "scale": "fp32"}


def _kernel(
    target: Target, function: Any, constexprs: dict[str, Any], num_warps: int, num_stages: int = 3, **types: str
) -> Kernel:
    if "OVERLAP" in function.arg_names:
        constexprs = {**constexprs, "OVERLAP": overlaps(target)}
    known = {name: "*i32" for name in INT32} | {name: "*fp32" for name in FLOAT32}
    known |= {name: "*bf16" for name in BFLOAT16} | OTHER | types
    given = {name: known.get(name, "i32") for name in function.arg_names if name not in constexprs}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return Kernel(function, given, constexprs, options, tuple(n for n in given if n.endswith("_stride")))


def _product(target: Target, function: Any, tiles: Tiles, **more: Any) -> Kernel:
    blocks = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "PRECISION": "tf32"}
    # The weights' argument, where they come through a descriptor.
    name = "gate_up" if "gate_up" in function.arg_names else "down"
    weights = {name: f"tensordesc<bf16[{tiles.n}, {tiles.k}]>"} if tiles.tma else {}
    return _kernel(target, function, {**blocks, "TMA": tiles.tma, **more}, tiles.warps, tiles.stages, **weights)


def _experts(target: Target) -> list[Kernel]:
    tma = target.name in ("sm_90", "sm_100", "sm_120")
    device = Device(processors=100, shared_bytes=target.shared_bytes, tma=tma)
    found = {"PAIRS": TOKENS * TOP_K, "BY_PAIR": False}
    first = {"DEPTH": HIDDEN, "INNER": INNER, "TOP_K": TOP_K}
    by_pair = {"PAIRS": 16, "BY_PAIR": True}
    second = {"INNER": INNER, "WIDTH": HIDDEN}

    def pair(row: int) -> tuple[Tiles, Tiles]:
        _, gate_up, down = TABLE[row]
        return fit(gate_up, 2, HIDDEN, INNER, 2, device), fit(down, 1, INNER, HIDDEN, 2, device)

    few, some, many = pair(0), pair(2), pair(-1)
    by_tma = fit(replace(TABLE[-1][1], tma=True), 2, HIDDEN, INNER, 2, device)
    return [
        *(_product(target, few_gate_up_kernel, tiles[0], **first, **found) for tiles in (few, some)),
        _product(target, few_gate_up_kernel, few[0], **first, **by_pair),
        *(_product(target, few_down_kernel, tiles[1], **second, **found) for tiles in (few, some)),
        _product(target, gate_up_kernel, some[0], **first),
        _product(target, gate_up_kernel, many[0], **first),
        _product(target, gate_up_kernel, by_tma, **first),
        _product(target, down_kernel, many[1], **second),
    ]


def _sort(target: Target) -> list[Kernel]:
    size = {"EXPERTS": LOCAL, "CHUNK": 256}
    place = {**size, "BLOCKS": 8, "BLOCK_M": 128, "ROWS": 128}
    few = {"EXPERTS": LOCAL, "CHUNK": 64, "BLOCKS": 32, "BLOCK_M": 16, "ROWS": 512, "counts": None}
    return [
        _kernel(target, count_kernel, size, 8),
        _kernel(target, place_kernel, place, 8),
        _kernel(target, place_kernel, few, 8),
    ]


def _router(target: Target) -> list[Kernel]:
    """All forms of the tables, 64 experts and 256 in groups, and two ways to choose."""
    rules = {"TOP_K": TOP_K, "TOP_GROUPS": 1, "TOP2": True, "SIGMOID": True, "NORMALIZE": True, "CHOICES": 4}
    few = {**rules, "SLICES": 8, "VECTOR": 2, "ROWS": 1, "GROUPS": 1, "SIZE": 64}
    grouped = {**rules, "TOP_K": 8, "CHOICES": 8, "TOP_GROUPS": 4}
    grouped |= {"SLICES": 16, "VECTOR": 4, "ROWS": 2, "GROUPS": 8, "SIZE": 32}

    def product(form: Form, groups: int, size: int, width: int) -> Kernel:
        num_rows = min(form.tokens, 16384)
        tiles = choose_tiles(num_rows, groups, groups * size, width, 2, target.shared_bytes)
        blocks = {"WIDTH": width, "GROUPS": groups, "SIZE": size, "PRECISION": "tf32"}
        blocks |= {"ROWS": tiles.rows, "BLOCK_K": tiles.block_k}
        if tiles.fused:
            return _kernel(target, route_kernel, {**blocks, **rules}, tiles.warps, tiles.stages)
        blocks |= {"SLICE": tiles.slice_width(width), "EARLY": tiles.early(width, 2), "COLUMNS": tiles.columns}
        return _kernel(target, partial_kernel, blocks, tiles.warps, tiles.stages)

    return [
        *(product(form, 1, 64, HIDDEN) for form in NARROW),
        *(product(form, 8, 32, 7168) for form in WIDE),
        _kernel(target, choose_kernel, few, 1),
        _kernel(target, choose_kernel, grouped, 1),
    ]


def kernels(target: Target) -> list[Kernel]:
    row = {"TOP_K": TOP_K, "BLOCK": 1024}
    return [
        *_experts(target),
        *_sort(target),
        *_router(target),
        _kernel(target, combine_kernel, {"WIDTH": HIDDEN, **row}, 4, row="*i32"),
        _kernel(target, gather_kernel, row, 4, num_rows="*i32"),
        _kernel(target, silu_mul_kernel, {"BLOCK": 1024}, 4, num_rows="*i32"),
        _kernel(target, embed_kernel, {"BLOCK": 1024}, 4),
    ]
