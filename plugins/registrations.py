"""Registers the plugins with full TensorRT, for networks that contain them. The runtime calls the kernels directly."""

from __future__ import annotations

import importlib

from triton.backends.compiler import GPUTarget

FOLDERS = ("mla_attention", "cache_append", "lse_merge", "dop_exchange", "page_transfer", "grouped_experts")


def register_all(target: GPUTarget) -> None:
    """Registers all plugins, to be called once in a process. Kernels are compiled for `target`, the GPU that builds.

    ValueError if full TensorRT is missing or has no ahead-of-time plugins and aliased outputs (10.10 and later have).
    """
    try:
        trtp = importlib.import_module("tensorrt.plugin")
    except ImportError as error:
        raise ValueError(f"plugins need full TensorRT, which does not load ({error}); pip install tensorrt") from error
    lacking = [name for name in ("aot_impl", "KernelLaunchParams") if not hasattr(trtp, name)]
    if not hasattr(trtp.TensorDesc, "aliased"):
        lacking.append("TensorDesc.aliased")
    if lacking:
        raise ValueError(f"plugins need a newer TensorRT: this one's tensorrt.plugin lacks {', '.join(lacking)}")
    for folder in FOLDERS:
        importlib.import_module(f"splash_plugins.{folder}.trt").register(target)
