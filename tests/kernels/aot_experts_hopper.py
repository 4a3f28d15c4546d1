"""The routed experts' products for Hopper, as launched for glm-4.7-flash and deepseek-v3-slice on two ranks."""

from __future__ import annotations

from triton.experimental.gluon.language import NVMMASharedLayout

from splash_plugins.grouped_experts.hopper_kernel import COLUMNS, DEPTH, ROWS, hopper_kernel, registers
from tests.kernels.aot import Kernel, Target
from tests.kernels.aot_prefill import GluonKernel

# (hidden, intermediate), choices a token, dtype
CASES = (((2048, 1536), 4, "bf16"), ((7168, 2048), 8, "fp16"))


def product(depth: int, size: int, top_k: int, gated: bool, dtype: str) -> Kernel:
    layout = repr(NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    rows = f"*{dtype}" if gated else f"tensordesc<{dtype}[{ROWS // 2}, {DEPTH}],{layout}>"
    types = {"x": rows, "w": f"tensordesc<{dtype}[{COLUMNS // 2}, {DEPTH}],{layout}>", "out": f"*{dtype}"}
    types |= dict.fromkeys(("pairs", "blocks", "num_blocks"), "*i32") | dict.fromkeys(("x_stride", "group"), "i32")
    consumer, producer = registers(gated)
    constexprs = {
        "DEPTH": depth, "SIZE": size, "GATED": gated, "TOP_K": top_k,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
    }  # fmt: skip
    return GluonKernel(hopper_kernel, types, constexprs, {"num_warps": 4}, ("x_stride",))


def kernels(target: Target) -> list[Kernel]:
    if target.name != "sm_90":
        return []
    found = []
    for (hidden, inner), top_k, dtype in CASES:
        found.append(product(hidden, inner, top_k, True, dtype))
        found.append(product(inner, hidden, top_k, False, dtype))
    return found
