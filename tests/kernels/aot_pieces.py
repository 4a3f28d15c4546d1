"""piece_copy, for rows of every alignment."""

from __future__ import annotations

import triton.language as tl

from splash_plugins.piece_copy.kernel import BLOCK_BYTES, piece_copy_kernel
from tests.kernels.aot import Kernel, Target


def kernels(target: Target) -> list[Kernel]:
    arguments = {"pieces": "*i64", "count": "i32"}
    return [
        Kernel(
            piece_copy_kernel,
            arguments,
            {"INTEGER": integer, "SIZE": size, "WIDE": wide, "BLOCK": BLOCK_BYTES // size},
        )
        for integer, size, wide in ((tl.int32, 4, 4), (tl.int32, 4, 2), (tl.int32, 4, 1), (tl.int16, 2, 1))
    ]
