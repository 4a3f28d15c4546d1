"""cache_append's kernel with the arguments that TensorRT passes. The pool is [P, layers, S, W], input and output at the
same address."""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.aot import Entry
from splash_plugins.cache_append.kernel import append_kernel


@triton.jit
def cache_append_plugin(
    pool, rows, page, offset, written, LAYERS: tl.constexpr, LAYER: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    append_kernel(
        rows=rows, rows_stride=WIDTH, page=page, offset=offset, pages=written + LAYER * S * WIDTH,
        page_stride=LAYERS * S * WIDTH, row_stride=WIDTH, WIDTH=WIDTH, BLOCK=BLOCK,
    )  # fmt: skip


def entry(dtype: str, pool: tuple[int, int, int], layer: int) -> Entry:
    """What to compile. pool: (layers, S, W). Grid: one program a new row."""
    layers, page_tokens, width = pool
    return Entry(
        function=cache_append_plugin,
        inputs={"pool": dtype, "rows": dtype, "page": "*i32", "offset": "*i32"},
        outputs={"written": dtype},
        constexprs={
            "LAYERS": layers,
            "LAYER": layer,
            "S": page_tokens,
            "WIDTH": width,
            "BLOCK": triton.next_power_of_2(width),
        },
    )
