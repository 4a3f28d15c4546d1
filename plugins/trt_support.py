"""Helpers that the plugins' registrations share. Importing this module needs full TensorRT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp

from splash_plugins.aot import Compiled

POINTERS = {
    trt.float32: "*fp32",
    trt.float16: "*fp16",
    trt.bfloat16: "*bf16",
    trt.int32: "*i32",
    trt.int64: "*i64",
}


def pointer(tensor: Any) -> str:
    """Triton's name of the type of a pointer to a tensor's numbers. ValueError for a dtype that no kernel takes."""
    if tensor.dtype not in POINTERS:
        raise ValueError(f"{tensor.dtype} is none of {', '.join(str(t) for t in POINTERS)}")
    return POINTERS[tensor.dtype]


def item_bytes(tensor: Any) -> int:
    """Bytes of one number of a float32, float16 or bfloat16 tensor; the size of a kernel's tiles depends on it."""
    return 4 if tensor.dtype == trt.float32 else 2


def constants(tensor: Any, name: str, *axes: int) -> tuple[int, ...]:
    """Sizes of `tensor` along `axes`. ValueError if one of them is dynamic: the kernel is compiled for one size."""
    found = []
    for axis in axes:
        size = tensor.shape_expr[axis]
        if not size.is_constant:
            raise ValueError(f"{name}: dimension {axis} is dynamic, but the kernel is compiled for one size of it")
        found.append(size.constant_value())
    return tuple(found)


def launch(
    kernel: Compiled, grid: Sequence[Any], scalars: Sequence[Any] = ()
) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
    """What a plugin's aot_impl function has to return. grid, scalars: integers or expressions of the input shapes."""
    params = trtp.KernelLaunchParams()
    for axis, programs in zip("xyz", grid, strict=False):
        setattr(params, f"grid_{axis}", programs)
    params.block_x = kernel.threads
    params.shared_mem = kernel.shared_bytes
    extra = trtp.SymIntExprs(len(scalars))
    for i, scalar in enumerate(scalars):
        extra[i] = trtp.SymInt32(scalar)
    return kernel.name, kernel.ptx, params, extra
