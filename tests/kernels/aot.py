"""Compiles Triton kernels for GPUs that this machine does not have, each as its launcher would launch it there.

A part of the kernels adds itself by a file `aot_<part>.py` beside this one, with a function

    kernels(target: Target) -> list[Kernel]

test_compile.py finds it and runs `python -m tests.kernels.aot aot_<part>`: a process of its own, since a process whose
Triton interprets kernels cannot compile them. The part chooses block sizes and options for `target` as its launcher
does. A kernel fails if it does not compile, or asks for more shared memory than a block can get on the target.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Target:
    name: str
    backend: str
    arch: int | str
    warp_size: int
    # What one block can get at most.
    shared_bytes: int

    @property
    def is_nvidia(self) -> bool:
        return self.backend == "cuda"


TARGETS = (
    Target("sm_80", "cuda", 80, 32, 163 * 1024),
    Target("sm_90", "cuda", 90, 32, 227 * 1024),
    Target("sm_100", "cuda", 100, 32, 227 * 1024),
    Target("sm_120", "cuda", 120, 32, 99 * 1024),
    Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
)


def overlaps(target: Target) -> bool:
    """Whether kernels there can begin while the one before them ends (plugins/overlap_kernel.py)."""
    return target.is_nvidia and int(target.arch) >= 90


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a @triton.jit function.

    `types` gives every argument that is no constexpr its Triton type, such as "*bf16", "i32" or "fp32". Pointers are
    taken to be divisible by 16, as Triton finds torch's to be at a launch; name integers for which that holds as well
    (strides mostly) in `aligned`.
    """

    function: Any
    types: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    # num_warps, num_stages
    options: dict[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()

    def source(self) -> ASTSource:
        names = self.function.arg_names
        missing = [n for n in names if (n in self.types) == (n in self.constexprs)]
        assert not missing, f"{self.function.__name__}: give each of {missing} either a type or a constexpr"
        signature = {n: self.types.get(n, "constexpr") for n in names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n in self.aligned or signature[n].startswith("*")
        }
        return ASTSource(self.function, signature, self.constexprs, attrs)


def compile_for(kernel: Kernel, target: Target) -> int:
    """Compiles it; returns the shared memory that a block needs, in bytes."""
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    return int(triton.compile(kernel.source(), target=gpu, options=kernel.options).metadata.shared)


def compile_one(part: str, target: Target, number: int) -> tuple[bool, str]:
    """The part's kernel of that number, by itself; whether its shared memory fits, and what there is to say."""
    kernel = importlib.import_module(f"tests.kernels.{part}").kernels(target)[number]
    start = time.perf_counter()
    shared = compile_for(kernel, target)
    seconds = time.perf_counter() - start
    fits = shared <= target.shared_bytes
    said = f"{target.name} {kernel.function.__name__} {kernel.constexprs}: {seconds:.1f} s, {shared} bytes shared"
    return fits, said + ("" if fits else f", more than {target.shared_bytes}")


def main(part: str) -> int:
    kernels = importlib.import_module(f"tests.kernels.{part}").kernels
    jobs = [(part, target, i) for target in TARGETS for i in range(len(kernels(target)))]
    failed = False
    # Forked before anything has been compiled: to import Triton takes as long as to compile a kernel.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork")) as pool:
        for fits, said in pool.map(compile_one, *zip(*jobs, strict=True)):
            failed |= not fits
            print(said, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
