"""DOP's exchange with the arguments that TensorRT passes: a rank puts rows into its mailbox, then reads from all.

N ranks, A tokens, B of them owned by this rank, H heads, h_r of rank r. Mailboxes are those of
plugins/peer_rows/kernel.py, and the kernels that read begin with its meeting. A rank may put the next exchange's rows
while others still read this one's, so exchanges use two places (`start`) in turn.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from splash_plugins.aot import Entry
from splash_plugins.peer_rows.kernel import MAX_BLOCKS, MAX_RANKS, pick_rows_kernel, to_owners_kernel

PROGRAMS = 64
"""Programs of the kernels that read: the same number on all ranks, and few enough to run beside other kernels."""
BLOCK = 1024
ALIGN = 16  # bytes; wide loads begin at multiples of it


@triton.jit
def dop_put_plugin(box, rows, count, written, START: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(written + START + at, tl.load(rows + at, mask=at < count), mask=at < count)


@triton.jit
def dop_exchange_plugin(
    box, bases, owned, num_rows, out,
    START: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, RANKS: tl.constexpr, MEET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    to_owners_kernel(
        bases=bases, start=START, owned=owned, out=out, num_rows=num_rows, heads=HEADS, width=WIDTH, rank=RANK,
        SIZE=SIZE, BLOCKS=BLOCKS, RANKS=RANKS, MEET=MEET, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def dop_return_plugin(
    box, bases, owner, place, num_rows, out,
    START: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, RANKS: tl.constexpr, MEET: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pick_rows_kernel(
        bases=bases, sources=bases, start=START, rank_of=owner, index=place, sub_index=place, out=out,
        num_rows=num_rows, width=WIDTH, stride=STRIDE, sub_stride=0, rank=RANK,
        SIZE=SIZE, BLOCKS=BLOCKS, RANKS=RANKS, MEET=MEET, SUB=False, FILL=False, BLOCK=BLOCK, ALIGN=ALIGN,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Box:
    """Where an exchange's rows lie. start: in every mailbox, in numbers of the dtype. rank: this one; size: the number
    of ranks. meet: False for a test without peers."""

    dtype: str
    item_bytes: int
    start: int
    rank: int
    size: int
    meet: bool = True

    def __post_init__(self) -> None:
        if self.start * self.item_bytes % ALIGN:
            raise ValueError(f"start: {self.start} numbers of {self.item_bytes} bytes are no multiple of {ALIGN} bytes")

    def constexprs(self) -> dict[str, object]:
        return {
            "RANK": self.rank,
            "SIZE": self.size,
            "BLOCKS": MAX_BLOCKS,
            "RANKS": MAX_RANKS,
            "MEET": self.meet and self.size > 1,
            "BLOCK": BLOCK,
        }


def put_entry(dtype: str, start: int) -> Entry:
    """What to compile to put rows. Grid: numbers by BLOCK; the scalar is how many numbers there are."""
    return Entry(
        function=dop_put_plugin,
        inputs={"box": dtype, "rows": dtype},
        scalars=("count",),
        outputs={"written": dtype},
        constexprs={"START": start, "BLOCK": BLOCK},
    )


def exchange_entry(box: Box, heads: int, width: int) -> Entry:
    """What to compile for out [B, H, W]: all heads of the tokens owned here. Grid: PROGRAMS; the scalar is B."""
    return Entry(
        function=dop_exchange_plugin,
        inputs={"box": box.dtype, "bases": "*i64", "owned": "*i32"},
        scalars=("num_rows",),
        outputs={"out": box.dtype},
        constexprs={"START": box.start * box.item_bytes, "HEADS": heads, "WIDTH": width, **box.constexprs()},
    )


def return_entry(box: Box, heads: int, first_head: int, own_heads: int, latent: int) -> Entry:
    """What to compile for out [A, h_r, L]: this rank's heads of all tokens, from their owners' [B, H, L]. Grid:
    PROGRAMS; the scalar is A."""
    start = (box.start + first_head * latent) * box.item_bytes
    return Entry(
        function=dop_return_plugin,
        inputs={"box": box.dtype, "bases": "*i64", "owner": "*i32", "place": "*i32"},
        scalars=("num_rows",),
        outputs={"out": box.dtype},
        constexprs={
            "START": start,
            "WIDTH": own_heads * latent,
            "STRIDE": heads * latent,
            **box.constexprs(),
            "ALIGN": ALIGN if start % ALIGN == 0 else box.item_bytes,
        },
    )
