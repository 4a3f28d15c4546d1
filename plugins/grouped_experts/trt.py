"""TensorRT plugins splash::grouped_experts_up and …_down: this rank's routed experts, for steps of few tokens, as
reference.py.

Two plugins, since TensorRT launches one kernel for each and gives it no scratch memory.
"""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.grouped_experts.plugin_kernel import Sizes, down_entry, up_entry
from splash_plugins.trt_support import constants, item_bytes, launch, pointer

UP = "splash::grouped_experts_up"
DOWN = "splash::grouped_experts_down"


def register(target: GPUTarget) -> None:
    """T tokens, D hidden, I intermediate, k choices a token, E_r experts on this rank; choice -1 is no expert's."""
    _register_up(target)
    _register_down(target)


def _register_up(target: GPUTarget) -> None:
    """Inputs: x [T, D], choice [T, k] int32, gate_up [E_r, 2 I, D]. Output: hidden [T k, I], undefined for pairs of
    other ranks' experts."""

    @trtp.register(UP)
    def describe(
        x: trtp.TensorDesc, choice: trtp.TensorDesc, gate_up: trtp.TensorDesc, first_expert: int, max_tokens: int
    ) -> trtp.TensorDesc:
        pairs = choice.shape_expr[0] * choice.shape_expr[1]
        return trtp.from_shape_expr((pairs, gate_up.shape_expr[1] // 2), x.dtype)

    @trtp.aot_impl(UP)
    def implement(
        x: trtp.TensorDesc,
        choice: trtp.TensorDesc,
        gate_up: trtp.TensorDesc,
        first_expert: int,
        max_tokens: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        experts, double, hidden = constants(gate_up, "gate_up", 0, 1, 2)
        (top_k,) = constants(choice, "choice", 1)
        sizes = Sizes(
            hidden=hidden,
            inner=double // 2,
            experts=experts,
            first_expert=first_expert,
            top_k=top_k,
            max_tokens=max_tokens,
            item_bytes=item_bytes(x),
        )
        made = up_entry(pointer(x), sizes, target)
        columns = -(-sizes.inner // made.constexprs["BLOCK_N"])
        return launch(compile_entry(made, target), [columns, experts], [choice.shape_expr[0] * top_k])


def _register_down(target: GPUTarget) -> None:
    """Inputs: hidden [T k, I], down [E_r, D, I], choice [T, k] int32, weight [T, k] float32. Output: out [T, D]."""

    @trtp.register(DOWN)
    def describe(
        hidden: trtp.TensorDesc,
        down: trtp.TensorDesc,
        choice: trtp.TensorDesc,
        weight: trtp.TensorDesc,
        first_expert: int,
        max_tokens: int,
    ) -> trtp.TensorDesc:
        return trtp.from_shape_expr((choice.shape_expr[0], down.shape_expr[1]), hidden.dtype)

    @trtp.aot_impl(DOWN)
    def implement(
        hidden: trtp.TensorDesc,
        down: trtp.TensorDesc,
        choice: trtp.TensorDesc,
        weight: trtp.TensorDesc,
        first_expert: int,
        max_tokens: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        experts, width, inner = constants(down, "down", 0, 1, 2)
        (top_k,) = constants(choice, "choice", 1)
        sizes = Sizes(
            hidden=width,
            inner=inner,
            experts=experts,
            first_expert=first_expert,
            top_k=top_k,
            max_tokens=max_tokens,
            item_bytes=item_bytes(hidden),
        )
        made = down_entry(pointer(hidden), sizes, target)
        columns = -(-width // made.constexprs["BLOCK_N"])
        return launch(compile_entry(made, target), [columns, choice.shape_expr[0]])
