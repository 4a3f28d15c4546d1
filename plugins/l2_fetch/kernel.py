"""Triton: has memory fetched into the L2, by the engine that copies (NVIDIA from compute capability 9.0).

For weights that the next kernels read: while those that are there wait for one another, memory has nothing to do.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PIECE_BYTES = 16 << 10
BLOCK = 32


@triton.jit
def fetch_kernel(pieces, count, BLOCK: tl.constexpr):
    """pieces [count, 2] int64: address and bytes, multiples of 16."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = index < count
    address = tl.load(pieces + index * 2, mask=wanted, other=0)
    num_bytes = tl.load(pieces + index * 2 + 1, mask=wanted, other=0).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [address, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def fetch_list(tensors: Sequence[torch.Tensor], most_bytes: int) -> torch.Tensor | None:
    """What `fetch` takes to fetch these contiguous tensors, as far as most_bytes go; None where it cannot."""
    device = tensors[0].device
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    pieces: list[tuple[int, int]] = []
    for tensor in tensors:
        begin, size = tensor.data_ptr(), min(tensor.nbytes, most_bytes) // 16 * 16
        assert tensor.is_contiguous() and begin % 16 == 0
        pieces += [(begin + at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
        most_bytes -= size
    return torch.tensor(pieces, dtype=torch.int64, device=device)


def fetch(pieces: torch.Tensor) -> None:
    """pieces: of fetch_list."""
    fetch_kernel[(triton.cdiv(len(pieces), BLOCK),)](pieces, len(pieces), BLOCK=BLOCK, num_warps=1)
