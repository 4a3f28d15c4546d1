"""Triton: the embedding of a step's tokens, whose ids may be known only on the device. Reads and writes TD numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["first_id", "num_ids"])
def embed_kernel(ids, slot, last_sampled, table, out, out_stride, width, first_id, num_ids, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wanted = tl.load(ids + row).to(tl.int64)
    place = tl.load(slot + row)
    sampled = tl.load(last_sampled + place, mask=(wanted < 0) & (place >= 0), other=-1)
    wanted = tl.where(wanted < 0, sampled, wanted)
    local = wanted - first_id
    here = (wanted >= 0) & (local >= 0) & (local < num_ids)
    value = tl.load(table + local * width + column, mask=inside & here, other=0.0)
    tl.store(out + row * out_stride + column, value, mask=inside)


def embed(
    ids: torch.Tensor,
    slot: torch.Tensor,
    last_sampled: torch.Tensor,
    table: torch.Tensor,
    first_id: int,
    out: torch.Tensor,
) -> None:
    """As plugins/embed/reference.py; table and the rows of out are contiguous. An empty table gives zeros."""
    rows = len(ids)
    if rows == 0:
        return
    num_ids, width = table.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    embed_kernel[(rows, triton.cdiv(width, block))](
        ids, slot, last_sampled, table, out, out.stride(0), width, first_id, num_ids,
        BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
