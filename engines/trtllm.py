"""TensorRT-LLM's CUDA operators, as `torch.ops.trtllm.*`: from its own package, or from a wheel that has only them.

TensorRT-LLM no longer builds engines of its own; this project takes its kernels only. They are candidates of the
registry (registry.py) like any others, used where they are installed, right and fastest. On a machine without an NVIDIA
GPU neither package loads, so neither is imported there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

OLDEST = (1, 2)  # the first release whose operators have the signatures that are called here
SEPARATE_WITHOUT_HOPPER = (1, 3)  # from here on the separate wheel is built for newer GPUs alone
HOPPER = (9, 0)


@dataclass(frozen=True)
class Package:
    distribution: str
    module: str
    """Importing it registers the operators."""
    remedy: str
    separate: bool
    """It has the kernels only, built from TensorRT-LLM's source by others than NVIDIA."""


PACKAGES = (
    Package("tensorrt_llm", "tensorrt_llm", "install tensorrt-llm==1.2.1 from NVIDIA's package index", False),
    Package(
        "tokenspeed-trtllm-kernel",
        "trtllm_kernel",
        "pip install tokenspeed-trtllm-kernel==1.2.1.post20260427",
        True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """What a probe has to know of the machine's GPU."""

    name: str
    capability: tuple[int, int]

    @staticmethod
    def here() -> Gpu | None:
        """The current CUDA device; None without one, and on AMD's."""
        if not torch.cuda.is_available() or torch.version.hip is not None:
            return None
        return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


@dataclass(frozen=True)
class Trtllm:
    """What a probe found."""

    package: str | None
    """Name and version of the package that registered the operators; None: no package did."""
    reasons: tuple[str, ...]
    """For each package that is not used: why, and what would help."""
    has_headers: bool = False
    """The package contains the sources that its operators compile when they are called."""

    def operator(self, name: str) -> Callable[..., Any] | str:
        """The operator, or the reason why there is none."""
        if self.package is None:
            return "TensorRT-LLM's operators are not here"
        try:
            found: Callable[..., Any] = getattr(torch.ops.trtllm, name)
        except AttributeError:
            return f"{self.package} has no {name}"
        return found


def numbers_of(version: str) -> tuple[int, ...]:
    """(1, 2, 1) for 1.2.1.post20260427; an empty tuple if the version does not begin with a number."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def probe(
    gpu: Gpu | None,
    version_of: Callable[[str], str] = importlib.metadata.version,
    load: Callable[[str], Any] = importlib.import_module,
) -> Trtllm:
    """Looks for packages with the operators, TensorRT-LLM's own first, and loads the first that can be used here."""
    reasons: list[str] = []
    for package in PACKAGES:
        reason = _try(package, gpu, version_of, load)
        if reason is None:
            name = f"{package.distribution} {version_of(package.distribution)}"
            return Trtllm(name, tuple(reasons), has_headers=not package.separate)
        reasons.append(f"{package.distribution}: {reason}")
    return Trtllm(None, tuple(reasons))


def _try(package: Package, gpu: Gpu | None, version_of: Callable[[str], str], load: Callable[[str], Any]) -> str | None:
    """Loads a package. Returns the reason if it cannot be used; None: it is loaded."""
    try:
        version = version_of(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed ({package.remedy})"
    numbers = numbers_of(version)
    if numbers < OLDEST:
        return f"{version} is older than {'.'.join(map(str, OLDEST))} ({package.remedy})"
    if gpu is None:
        return f"{version} needs an NVIDIA GPU, and this machine has none"
    if package.separate and gpu.capability == HOPPER and numbers >= SEPARATE_WITHOUT_HOPPER:
        return f"{version} has no kernels for {gpu.name} ({package.remedy})"
    try:
        load(package.module)
    except (ImportError, OSError, RuntimeError) as error:
        # The package of that name on PyPI is a placeholder that says so when it is imported; a missing shared library
        # is an OSError, and operators that are registered twice are a RuntimeError.
        return f"{version} does not load: {' '.join(str(error).split())}"
    return None
