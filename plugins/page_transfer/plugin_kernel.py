"""page_transfer's kernel with the arguments that TensorRT passes. The pool is [P, …], input and output at the same
address."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.aot import Entry
from splash_plugins.page_transfer.kernel import BLOCK, transfer_kernel


@triton.jit
def page_transfer_plugin(source, taken, placed, pool, written, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    transfer_kernel(source=source, taken=taken, placed=placed, pool=written, SIZE=SIZE, BLOCK=BLOCK)


def entry(dtype: str, size: int) -> Entry:
    """What to compile. size: numbers in a page. Grid: (pages to copy, blocks of a page)."""
    return Entry(
        function=page_transfer_plugin,
        inputs={"source": dtype, "taken": "*i32", "placed": "*i32", "pool": dtype},
        outputs={"written": dtype},
        constexprs={"SIZE": size, "BLOCK": BLOCK},
        num_warps=8,
    )
