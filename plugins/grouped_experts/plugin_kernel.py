"""The experts' two products as TensorRT calls them, for steps of few tokens: two plugin layers, one kernel each.

T tokens, D hidden, I intermediate, k choices a token, E_r experts here. A prefill's experts, which are sorted first,
are the runtime's.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import Entry, shared_bytes_of
from splash_plugins.grouped_experts.few_kernel import few_gate_up_kernel, token_down_kernel

MAX_PAIRS = 1024  # (token, choice) pairs that every program looks through


@triton.jit
def experts_up_plugin(
    x, choice, gate_up, num_pairs, hidden,
    FIRST: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    few_gate_up_kernel(
        x=x, x_stride=DEPTH, gate_up=gate_up, hidden=hidden, choice=choice, num_pairs=num_pairs,
        first_expert=FIRST, num_experts=EXPERTS, DEPTH=DEPTH, INNER=INNER, TOP_K=TOP_K, PAIRS=PAIRS, BY_PAIR=False,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, TMA=False, PRECISION=PRECISION,
    )  # fmt: skip


@triton.jit
def experts_down_plugin(
    hidden, down, choice, weight, out,
    FIRST: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    token_down_kernel(
        hidden=hidden, down=down, choice=choice, weight=weight, addend=None, addend_stride=0, out=out, out_stride=WIDTH,
        first_expert=FIRST, num_experts=EXPERTS, INNER=INNER, WIDTH=WIDTH, TOP_K=TOP_K,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, TMA=False, PRECISION=PRECISION,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """first_expert: of the experts here; max_tokens: the most that a step has."""

    hidden: int
    inner: int
    experts: int
    first_expert: int
    top_k: int
    max_tokens: int
    item_bytes: int

    def __post_init__(self) -> None:
        if self.max_tokens * self.top_k > MAX_PAIRS:
            raise ValueError(
                f"max_tokens: {self.max_tokens} tokens with {self.top_k} experts each are more than {MAX_PAIRS} pairs; "
                "larger steps are for the runtime's own kernels"
            )


@dataclass(frozen=True)
class Blocks:
    """Of one product, for the few rows that an expert has in such a step."""

    n: int
    k: int
    stages: int
    m: int = 16
    warps: int = 4

    @staticmethod
    def of(operands: int, depth: int, width: int, item_bytes: int, target: GPUTarget) -> Blocks:
        """For a [*, depth] by [operands * width, depth] product; stages that fit the target's shared memory."""
        n, k = (32, 128) if item_bytes < 4 else (16, 32)
        n, k = (min(size, max(16, triton.next_power_of_2(most))) for size, most in ((n, width), (k, depth)))
        stage = (16 + operands * n) * k * item_bytes
        return Blocks(n, k, max(1, min(3, shared_bytes_of(target) // stage)))


def up_entry(dtype: str, sizes: Sizes, target: GPUTarget) -> Entry:
    """hidden [T * k, I]. Grid: (columns of I by BLOCK_N, E_r); the scalar is the number of pairs."""
    tiles = Blocks.of(2, sizes.hidden, sizes.inner, sizes.item_bytes, target)
    return Entry(
        function=experts_up_plugin,
        inputs={"x": dtype, "choice": "*i32", "gate_up": dtype},
        scalars=("num_pairs",),
        outputs={"hidden": dtype},
        constexprs={
            "FIRST": sizes.first_expert,
            "EXPERTS": sizes.experts,
            "DEPTH": sizes.hidden,
            "INNER": sizes.inner,
            "TOP_K": sizes.top_k,
            "PAIRS": max(16, triton.next_power_of_2(sizes.max_tokens * sizes.top_k)),
            **_blocks(tiles, dtype),
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def down_entry(dtype: str, sizes: Sizes, target: GPUTarget) -> Entry:
    """out [T, D]. Grid: (columns of D by BLOCK_N, T)."""
    tiles = Blocks.of(1, sizes.inner, sizes.hidden, sizes.item_bytes, target)
    return Entry(
        function=experts_down_plugin,
        inputs={"hidden": dtype, "down": dtype, "choice": "*i32", "weight": "*fp32"},
        outputs={"out": dtype},
        constexprs={
            "FIRST": sizes.first_expert,
            "EXPERTS": sizes.experts,
            "INNER": sizes.inner,
            "WIDTH": sizes.hidden,
            "TOP_K": sizes.top_k,
            **_blocks(tiles, dtype),
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _blocks(tiles: Blocks, dtype: str) -> dict[str, object]:
    precision = "ieee" if dtype == "*fp32" else "tf32"
    return {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "PRECISION": precision}
