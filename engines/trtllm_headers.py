"""Gives TensorRT-LLM's FP8 block product the headers of the kernel that it compiles when it is first called.

The operator runs `pip show tensorrt_llm` once in a process, takes the line "Location: X", and gives NVRTC the folders
X/tensorrt_llm/include (deep_gemm/*.cuh) and X/tensorrt_llm/include/cuda/include (CUDA's). The wheel that has only the
operators comes without these headers, and then there is no tensorrt_llm that pip could show: compilation fails with
"NVRTC compilation failed", and no environment variable can name a folder instead. FlashInfer ships the same headers.
So a folder is made that looks like TensorRT-LLM's, with a `pip` program that names it, and this program comes first on
PATH during the operator's first call.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splash_trt import environment

KERNEL = "fp8_gemm_impl.cuh"
FLASHINFER = "flashinfer-python"
IN_FLASHINFER = "flashinfer/data/csrc/nv_internal/tensorrt_llm/deep_gemm"
CUDA_PACKAGE = "nvidia-cuda-runtime"
IN_CUDA_PACKAGE = "nvidia/cu13/include"
CUDA_HEADERS = ("cuda.h", "cuda_bf16.h", "cuda_fp8.h")


@dataclass(frozen=True)
class Headers:
    deep_gemm: Path
    """A folder that holds fp8_gemm_impl.cuh and what it includes."""
    cuda: Path
    """CUDA's include folder."""


def find_headers(
    deep_gemm: Path | None = None,
    cuda: Path | None = None,
    file_of: Callable[[str, str], Path | None] | None = None,
) -> Headers | str:
    """The headers in the given folders, else in installed packages; or the reason why there are none."""
    look_up = file_of or installed_file
    deep_gemm = deep_gemm or look_up(FLASHINFER, IN_FLASHINFER)
    if deep_gemm is None or not (deep_gemm / KERNEL).is_file():
        return f"the kernel's headers are not there: pip install --no-deps {FLASHINFER}==0.6.13"
    for folder in (cuda, look_up(CUDA_PACKAGE, IN_CUDA_PACKAGE), *_toolkit()):
        if folder is not None and all((folder / name).is_file() for name in CUDA_HEADERS):
            return Headers(deep_gemm, folder)
    return f"CUDA's headers are not there: install its toolkit, or pip install {CUDA_PACKAGE}"


def installed_file(distribution: str, path: str) -> Path | None:
    """Where an installed distribution has `path`, which need not exist; None if the distribution is not installed."""
    try:
        return Path(str(importlib.metadata.distribution(distribution).locate_file(path)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _toolkit() -> list[Path]:
    compiler = shutil.which("nvcc", path=environment.search_path())
    beside = [Path(compiler).resolve().parents[1] / "include"] if compiler else []
    return [*beside, Path("/usr/local/cuda/include")]


class LaidOut:
    """A temporary folder that looks like TensorRT-LLM's installation to its compiler. It has to exist until the last
    compilation."""

    def __init__(self, headers: Headers) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="splash-trtllm-")
        root = Path(self._folder.name)
        include = root / "tensorrt_llm" / "include"
        (include / "cuda").mkdir(parents=True)
        (include / "deep_gemm").symlink_to(headers.deep_gemm.resolve(), target_is_directory=True)
        (include / "cuda" / "include").symlink_to(headers.cuda.resolve(), target_is_directory=True)
        self.programs = root / "bin"
        """The folder of `pip`, which has to be first on PATH when the operator is called for the first time."""
        self.programs.mkdir()
        pip = self.programs / "pip"
        pip.write_text(f"#!/bin/sh\necho Location: {shlex.quote(str(root))}\n", encoding="utf-8")
        pip.chmod(0o755)
