"""lse_merge, cache_append and page_transfer, for the targets that TensorRT is not on as well."""

from __future__ import annotations

from splash_plugins.cache_append.kernel import append_kernel
from splash_plugins.lse_merge.kernel import lse_merge_kernel
from splash_plugins.page_transfer.kernel import BLOCK, transfer_kernel
from tests.kernels.aot import Kernel, Target


def kernels(target: Target) -> list[Kernel]:
    merge = {"outs": "*fp32", "lses": "*fp32", "num_rows": "i32", "out": "*fp32", "lse": "*fp32"}
    append = {
        "rows": "*bf16", "rows_stride": "i32", "page": "*i32", "offset": "*i32", "pages": "*bf16",
        "page_stride": "i32", "row_stride": "i32",
    }  # fmt: skip
    transfer = {"source": "*bf16", "taken": "*i32", "placed": "*i32", "pool": "*bf16"}
    return [
        Kernel(lse_merge_kernel, merge, {"PARTS": 2, "SIZE": 512, "BLOCK": 512}),
        Kernel(append_kernel, append, {"WIDTH": 576, "BLOCK": 1024}, aligned=("page_stride", "row_stride")),
        Kernel(transfer_kernel, transfer, {"SIZE": 47 * 64 * 576, "BLOCK": BLOCK}, {"num_warps": 8}),
    ]
