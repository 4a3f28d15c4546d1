"""The prefill attention and its row gathering, ahead of time."""

from __future__ import annotations

from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from splash_plugins.mla_attention import prefill_hopper_kernel
from splash_plugins.mla_attention.gather_kernel import BLOCK_ROWS, _gather_kernel
from splash_plugins.mla_attention.prefill_kernel import (
    HEAD_GROUP,
    Blocks,
    _prefill_kernel,
    choose_blocks,
    pad,
    split_nope,
)
from splash_plugins.mla_attention.tiles import PREFILL_TILE
from tests.kernels.aot import Kernel, Target

# (nope, rope, v), dtype, merge: glm-4.7-flash, deepseek-v3, and a tiny model
CASES = (
    ((192, 64, 256), "bf16", True),
    ((128, 64, 128), "bf16", True),
    ((24, 8, 20), "fp32", True),
)
ALIGNED = tuple(f"{tensor}_{axis}" for tensor in ("q", "key", "value", "out") for axis in ("stride", "head")) + (
    "rope_stride",
)


def prefill_kernel(dims: tuple[int, int, int], dtype: str, blocks: Blocks, merge: bool) -> Kernel:
    nope, rope, vd = dims
    head, tail = split_nope(nope)
    widths = {"keys": head, "keys_tail": tail or head, "key_ropes": pad(rope), "values": pad(vd)}
    out = "fp32" if merge else dtype
    types = {"q": dtype, "value_data": dtype, "position": "i32", "segments": "i32", "tiles": "i32", "out": out}
    types = {name: f"*{type_}" for name, type_ in types.items()} | {"lse": "*fp32", "scale": "fp32"}
    for name, width in widths.items():
        types[name] = f"tensordesc<{dtype}[{blocks.block_n},{width}]>" if blocks.tma else f"*{dtype}"
    integers = ("num_tiles", "heads", "lse_stride", "lse_head", *ALIGNED)
    constexprs = {
        "NOPE": nope, "HEAD": head, "TAIL": tail, "R": rope, "ROPE": pad(rope), "VD": vd, "VALUE": pad(vd),
        "TILE": PREFILL_TILE, "BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "GROUP": HEAD_GROUP,
        "TMA": blocks.tma, "HAS_LSE": True, "MERGE": merge, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    return Kernel(
        _prefill_kernel,
        types | dict.fromkeys(integers, "i32"),
        constexprs,
        {"num_warps": blocks.warps, "num_stages": blocks.stages},
        ALIGNED if vd % 16 == 0 else (),
    )


class GluonKernel(Kernel):
    def source(self) -> GluonASTSource:
        plain = super().source()
        return GluonASTSource(self.function, plain.signature, self.constexprs, plain.attrs)


def hopper_kernel(dims: tuple[int, int, int], merge: bool) -> Kernel:
    nope, rope, vd = dims
    keys = prefill_hopper_kernel.block_n(vd)
    layout = repr(NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    shapes = {"q": (64, 64), "keys": (keys, 64), "ropes": (keys, 64), "values": (keys, vd)}
    types = {name: f"tensordesc<bf16[{rows}, {columns}],{layout}>" for name, (rows, columns) in shapes.items()}
    types |= {name: "*i32" for name in ("position", "segments", "tiles")}
    types |= {"out": "*fp32" if merge else "*bf16", "lse": "*fp32", "scale": "fp32"}
    strides = ("q_head", "key_head", "value_head", "out_stride", "out_head")
    types |= dict.fromkeys(("num_tiles", "heads", "lse_stride", "lse_head", *strides), "i32")
    constexprs = {
        "NOPE": nope, "R": rope, "VD": vd, "BLOCK_N": keys, "STAGES": prefill_hopper_kernel.STAGES,
        "GROUP": HEAD_GROUP, "HAS_LSE": True, "MERGE": merge,
        "CONSUMER_REGISTERS": prefill_hopper_kernel.CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": prefill_hopper_kernel.PRODUCER_REGISTERS,
    }  # fmt: skip
    return GluonKernel(prefill_hopper_kernel._prefill_hopper_kernel, types, constexprs, {"num_warps": 4}, strides)


def gather_kernel(width: int) -> Kernel:
    types = {"pages": "*bf16", "page": "*i32", "offset": "*i32", "out": "*bf16"}
    strides = ("page_stride", "row_stride", "out_stride")
    return Kernel(
        _gather_kernel,
        types | dict.fromkeys(("num_rows", *strides), "i32"),
        {"WIDTH": width, "PADDED": 1024 if width > 512 else 64, "ROWS": BLOCK_ROWS},
        {"num_warps": 8},
        strides,
    )


def kernels(target: Target) -> list[Kernel]:
    has_tma = target.is_nvidia and int(target.arch) >= 90
    found = [gather_kernel(576), gather_kernel(40)]
    for dims, dtype, merge in CASES:
        tma = has_tma and dtype == "bf16"
        blocks = choose_blocks(*dims, 2 if dtype == "bf16" else 4, target.shared_bytes, tma)
        found.append(prefill_kernel(dims, dtype, blocks, merge))
    if target.name == "sm_90":
        found += [hopper_kernel(dims, merge) for dims, dtype, merge in CASES if dtype == "bf16"]
    return found
