"""The experts' two products with the arguments that TensorRT passes, for steps of few tokens: two plugin layers, one
kernel each.

T tokens, D hidden, I intermediate, k choices a token, E_r experts on this rank. Larger steps, whose pairs are sorted
first, are computed by the runtime's own kernels.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import Entry, shared_bytes_of
from splash_plugins.grouped_experts.few_kernel import few_gate_up_kernel
from splash_plugins.grouped_experts.product_kernel import down_tile

MAX_PAIRS = 1024  # most (token, choice) pairs of a step: every program looks through all of them


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
    """out [T, D]. Grid: (tiles of columns, tokens).

    This takes one launch, but an expert's weights are read again for each of its tokens.
    """
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Tensor cores need BLOCK_M rows; the first is the token's, the others are not used.
    keep = tl.arange(0, BLOCK_M) == 0
    total = tl.zeros((BLOCK_N,), tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        local = tl.load(choice + pair) - FIRST
        if (local >= 0) & (local < EXPERTS):
            row = tl.zeros((BLOCK_M,), tl.int64) + pair
            rows = down_tile(
                hidden, row, keep, down, local.to(tl.int64), n, INNER, WIDTH, BLOCK_N, BLOCK_K, False, PRECISION
            )
            # An expert's result is rounded as in the runtime's kernels.
            total += tl.sum(rows, 0).to(hidden.dtype.element_ty).to(tl.float32) * tl.load(weight + pair)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """first_expert: the id of this rank's first expert; max_tokens: the most tokens of a step."""

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
    """How one product is cut, for the few rows that an expert has in such a step."""

    n: int
    k: int
    stages: int
    m: int = 16
    warps: int = 4

    @staticmethod
    def of(operands: int, depth: int, width: int, item_bytes: int, target: GPUTarget) -> Blocks:
        """For a product of [*, depth] with [operands * width, depth]; with as many stages, up to 3, as fit into the
        target's shared memory."""
        n, k = (32, 128) if item_bytes < 4 else (16, 32)
        n, k = (min(size, max(16, triton.next_power_of_2(most))) for size, most in ((n, width), (k, depth)))
        stage = (16 + operands * n) * k * item_bytes
        return Blocks(n, k, max(1, min(3, shared_bytes_of(target) // stage)))


def up_entry(dtype: str, sizes: Sizes, target: GPUTarget) -> Entry:
    """What to compile for hidden [T k, I]. Grid: (columns of I by BLOCK_N, E_r); the scalar is the number of pairs."""
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
    """What to compile for out [T, D]. Grid: (columns of D by BLOCK_N, T)."""
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
