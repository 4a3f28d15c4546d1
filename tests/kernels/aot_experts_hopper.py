"""The routed experts' products for Hopper, as launched for glm-4.7-flash and deepseek-v3-slice on two ranks."""

from __future__ import annotations

from triton.experimental.gluon.language import NVMMASharedLayout

from splash_plugins.grouped_experts.hopper_kernel import DEPTH, DOWN, GATE_UP, ROWS, Form, hopper_kernel
from tests.kernels.aot import Kernel, Target
from tests.kernels.aot_prefill import GluonKernel

# (hidden, intermediate), choices a token, dtype
CASES = (((2048, 1536), 4, "bf16"), ((7168, 2048), 8, "fp16"))


def product(form: Form, depth: int, size: int, top_k: int, gated: bool, dtype: str) -> Kernel:
    layout = repr(NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    rows = f"*{dtype}" if form.gather else f"tensordesc<{dtype}[{ROWS // 2}, {DEPTH}],{layout}>"
    types = {"x": rows, "w": f"tensordesc<{dtype}[{form.columns // 2}, {DEPTH}],{layout}>", "out": f"*{dtype}"}
    types |= dict.fromkeys(("pairs", "blocks", "num_blocks"), "*i32") | dict.fromkeys(("x_stride", "group"), "i32")
    consumer, producer = form.registers
    constexprs = {
        "DEPTH": depth, "SIZE": size, "GATED": gated, "GATHER": form.gather, "TOP_K": top_k, "STAGES": form.stages,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
    }  # fmt: skip
    return GluonKernel(hopper_kernel, types, constexprs, {"num_warps": 4}, ("x_stride",))


def kernels(target: Target) -> list[Kernel]:
    if target.name != "sm_90":
        return []
    found = []
    for (hidden, inner), top_k, dtype in CASES:
        found.append(product(GATE_UP, hidden, inner, top_k, True, dtype))
        found.append(product(DOWN, inner, hidden, top_k, False, dtype))
    found.append(product(Form(), 2048, 1536, 4, True, "bf16"))
    return found
