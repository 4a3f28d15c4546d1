"""lse_merge's kernel for TensorRT: its arguments are in the order in which TensorRT passes them already."""

from __future__ import annotations

import triton

from splash_plugins.aot import Entry
from splash_plugins.lse_merge.kernel import lse_merge_kernel


def entry(parts: int, size: int) -> Entry:
    """What to compile. Grid: one program a row of [n, H]; the scalar is the number of rows."""
    return Entry(
        function=lse_merge_kernel,
        inputs={"outs": "*fp32", "lses": "*fp32"},
        scalars=("num_rows",),
        outputs={"out": "*fp32", "lse": "*fp32"},
        constexprs={"PARTS": parts, "SIZE": size, "BLOCK": triton.next_power_of_2(size)},
    )
