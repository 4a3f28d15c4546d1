"""The kernels that read other ranks' rows, as CudaPeers launches them for two to eight ranks."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from splash_plugins.peer_rows import kernel, push_kernel
from splash_trt.runtime.mailbox import SLOT_BYTES
from tests.kernels.aot import Kernel, Target, overlaps

WIDTH = 2048
BASE = {"bases": "*i64", "rank": "i32"}


def kernels(target: Target) -> list[Kernel]:
    overlap = overlaps(target)
    return [one for size in ((2, 8) if target.name == "sm_90" else (4,)) for one in _of(size, overlap)]


def _aligned(types: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in ("width", "stride", "sub_stride", "addend_stride") if name in types)


def _pushes(size: int, overlap: bool) -> list[Kernel]:
    rows = {"start": "i32", "out": "*bf16", "width": "i32"}
    summed = {**rows, "hidden": "*bf16", "weight": "*bf16", "eps": "fp32"}
    push = {"SIZE": size, "INTEGER": tl.int16, "SIGN": push_kernel.SIGN[2], "OVERLAP": overlap}
    to_sum = {**push, "SLOT_BYTES": SLOT_BYTES, "NORM": True, "COLUMNS": WIDTH}
    # The rows that are summed, or the pairs or parts whose sums they are.
    numbers = {"addend_stride": "i32", "first_expert": "i32", "num_experts": "i32"}
    pairs = {"y": "*bf16", "choice": "*i32", "share": "*fp32", **numbers}
    without = dict.fromkeys(("y", "choice", "share", "addend")) | {"TOP_K": 0}
    sources: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
        ({"partial": "*bf16", **numbers}, without),
        ({**pairs, "addend": "*bf16"}, {"partial": None, "TOP_K": 4}),
        (pairs, {"partial": None, "addend": None, "TOP_K": 8}),
        ({"y": "*fp32", **numbers}, {**dict.fromkeys(("partial", "choice", "share", "addend")), "TOP_K": 5}),
    )
    pushed = summed | {"num_rows": "i32"}
    spread = summed | {"offsets": "*i32", "tokens": "i32"}
    gathered = {**rows, "num_rows": "i32", "x": "*bf16", "offsets": "*i32", "tokens": "i32"}
    pushes = (
        *((push_kernel.push_sum_rows_kernel, pushed | types, to_sum | given) for types, given in sources),
        *((push_kernel.push_sum_spread_kernel, spread | types, to_sum | given) for types, given in sources),
        (push_kernel.push_sum_rows_kernel, pushed | sources[0][0], to_sum | sources[0][1] | {"NORM": False}),
        (push_kernel.push_sum_spread_kernel, spread | sources[1][0], to_sum | sources[1][1] | {"NORM": False}),
        (push_kernel.push_gather_kernel, gathered, {**push, "SPREAD": True, "BLOCK": WIDTH}),
    )
    return [
        Kernel(one, {**BASE, **types}, options, {"num_warps": 8}, _aligned(types)) for one, types, options in pushes
    ]


def _of(size: int, overlap: bool) -> list[Kernel]:
    meeting = {"SIZE": size, "BLOCKS": kernel.MAX_BLOCKS, "RANKS": kernel.MAX_RANKS}
    common = {**meeting, "MEET": True, "OVERLAP": overlap}

    def make(function: Any, types: dict[str, str], options: dict[str, Any], num_warps: int = 8) -> Kernel:
        return Kernel(function, {**BASE, **types}, {**common, **options}, {"num_warps": num_warps}, _aligned(types))

    rows = {"start": "i32", "out": "*bf16", "num_rows": "i32", "width": "i32"}
    summed = {**rows, "hidden": "*bf16", "weight": "*bf16", "offsets": "*i32", "eps": "fp32"}
    picked = {**rows, "sources": "*i64", "rank_of": "*i32", "index": "*i32", "sub_index": "*i32"}
    picked |= {"stride": "i32", "sub_stride": "i32"}
    merged = {**rows, "lse_start": "i32", "lse_like": "*fp32", "offsets": "*i32", "heads": "i32"}
    tile = {"NORM": True, "ROWS": 4, "COLUMNS": WIDTH}
    return [
        *_pushes(size, overlap),
        Kernel(kernel.meet_kernel, BASE, meeting, {"num_warps": 1}),
        *(
            make(kernel.sum_rows_kernel, summed, {**tile, "SPREAD": spread, "SUMMED": sliced})
            for spread, sliced in ((False, False), (True, False), (False, True))
        ),
        make(
            kernel.sum_rows_kernel,
            summed,
            {"NORM": True, "ROWS": 1, "COLUMNS": 8192, "SPREAD": False, "SUMMED": False},
            16,
        ),
        make(
            kernel.sum_slice_kernel,
            {"start": "i32", "like": "*bf16", "num_rows": "i32", "width": "i32"},
            {"BLOCK": 4096},
        ),
        make(kernel.gather_rows_kernel, {**rows, "offsets": "*i32", "total": "i32"}, {"SPREAD": True, "BLOCK": WIDTH}),
        make(kernel.pick_rows_kernel, picked, {"SUB": True, "FILL": False, "ALIGN": 16, "BLOCK": 1024}, 4),
        make(kernel.pick_rows_kernel, picked, {"SUB": False, "FILL": True, "ALIGN": 16, "BLOCK": WIDTH}, 4),
        make(kernel.to_owners_kernel, {**rows, "owned": "*i32", "heads": "i32"}, {"BLOCK": 8192}),
        make(kernel.merge_parts_kernel, merged, {"ROWS": 8, "COLUMNS": 512}),
        make(
            kernel.gather_small_kernel,
            {"start": "i32", "x": "*fp64", "out": "*fp64", "length": "i32"},
            {"BLOCK": 256},
            4,
        ),
    ]
