"""Compiles Triton kernels for TensorRT's ahead-of-time plugins, and makes the PTX take exactly what TensorRT passes.

TensorRT launches a plugin's kernel with pointers to its inputs, then int32 scalars, then pointers to its outputs, and
nothing else. Triton appends pointers of its own (scratch memory, profiling), which TensorRT does not know. They are
removed from the parameter list; a kernel that reads one of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PTX_VERSION = 87
"""That of CUDA 12.8, which knows every GPU up to SM 120. Drivers from 570 on can read it; Triton's default may be too
new for them."""

WARP = 32
SCALAR = "i32"
_ENTRY = re.compile(r"\.visible \.entry (?P<name>\w+)\(\n?(?P<params>.*?)\n\)", re.DOTALL)
_PARAM = re.compile(r"\.param \.(?P<type>\w+)(?P<pointer> \.ptr [^,]*?)? *(?P<name>\w+)$")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A @triton.jit function whose arguments are in TensorRT's order. Types are Triton's, such as "*bf16"."""

    function: Any
    inputs: Mapping[str, str]
    scalars: tuple[str, ...] = ()
    outputs: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    @property
    def arguments(self) -> dict[str, str]:
        """Name to type, in the order in which TensorRT passes them."""
        return {**self.inputs, **dict.fromkeys(self.scalars, SCALAR), **self.outputs}


@dataclass(frozen=True)
class Compiled:
    name: str
    ptx: str
    threads: int
    """In a block."""
    shared_bytes: int


def target_of(capability: tuple[int, int]) -> GPUTarget:
    """The target for an NVIDIA GPU of that compute capability."""
    return GPUTarget("cuda", capability[0] * 10 + capability[1], WARP)


def compile_entry(entry: Entry, target: GPUTarget) -> Compiled:
    """PTX that takes exactly entry.arguments. ValueError if the kernel needs memory that TensorRT does not provide."""
    names = list(entry.function.arg_names)
    assert names == [*entry.arguments, *entry.constexprs], f"{names} are not in TensorRT's order"
    signature = {name: entry.arguments.get(name, "constexpr") for name in names}
    # TensorRT requires that tensors' addresses are aligned to 256 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(entry.function, signature, dict(entry.constexprs), aligned)
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages, "ptx_version": PTX_VERSION}
    kernel = triton.compile(source, target=target, options=options)
    return Compiled(
        kernel.metadata.name,
        only_declared(kernel.asm["ptx"], list(entry.arguments.values())),
        kernel.metadata.num_warps * WARP,
        kernel.metadata.shared,
    )


def parameters(ptx: str) -> list[tuple[str, str, bool]]:
    """(name, type, whether it is a pointer) of each parameter of the kernel in `ptx`, of which there must be one."""
    entries = list(_ENTRY.finditer(ptx))
    assert len(entries) == 1, f"{len(entries)} kernels in one PTX"
    found = [_PARAM.search(line.strip().rstrip(",")) for line in entries[0]["params"].splitlines()]
    return [(p["name"], p["type"], p["pointer"] is not None) for p in found if p is not None]


def only_declared(ptx: str, types: list[str]) -> str:
    """`ptx` without the parameters past `types`. Asserts that the first ones are of these types; ValueError if the
    kernel reads one of the others."""
    found = parameters(ptx)
    wanted = [("u64", True) if t.startswith("*") else ("u32", False) for t in types]
    assert [(t, pointer) for _, t, pointer in found[: len(wanted)]] == wanted, f"{found} are not {types}"
    head = _ENTRY.search(ptx)
    assert head is not None
    body = ptx[head.end() :]
    for name, _, _ in found[len(wanted) :]:
        if re.search(rf"\b{name}\b", body):
            raise ValueError(f"{head['name']} reads {name}, memory of Triton's own that TensorRT gives no kernel")
    kept = head["params"].splitlines()[: len(wanted)]
    kept[-1] = kept[-1].rstrip().rstrip(",")
    return ptx[: head.start("params")] + "\n".join(kept) + ptx[head.end("params") :]


def shared_bytes_of(target: GPUTarget) -> int:
    """The bytes of shared memory that a block of threads can get at most (CUDA C++ programming guide, technical
    specifications)."""
    arch = int(target.arch)
    if arch >= 120 or arch in (86, 89):
        return 99 << 10
    return (227 if arch >= 90 else 163) << 10
