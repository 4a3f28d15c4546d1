"""TensorRT plugins splash::dop_put, dop_exchange and dop_return: bring DOP's queries to the tokens' owners, and the
latent outputs back.

As in plugin_kernel.py: rows are put into this rank's mailbox, which is an input of the network, bound by its address,
and then read from all mailboxes. N ranks, A tokens, B of them owned by this rank, H heads, h_r of rank r, W = L + R.
"""

# TensorRT reads annotations as they are: no `from __future__ import annotations` here. It wants implementations to
# take the arguments of their descriptions under the same names, used or not.

import tensorrt.plugin as trtp
from triton.backends.compiler import GPUTarget

from splash_plugins.aot import compile_entry
from splash_plugins.dop_exchange.plugin_kernel import (
    BLOCK,
    PROGRAMS,
    Box,
    exchange_entry,
    put_entry,
    return_entry,
)
from splash_plugins.trt_support import item_bytes, launch, pointer

PUT = "splash::dop_put"
EXCHANGE = "splash::dop_exchange"
RETURN = "splash::dop_return"


def register(target: GPUTarget) -> None:
    """box [numbers]: this rank's mailbox, in the rows' dtype; bases [N] int64: all mailboxes' addresses as this rank
    sees them. start: where the rows lie in a mailbox, in numbers."""
    _register_put(target)
    _register_exchange(target)
    _register_return(target)


def _box(box: trtp.TensorDesc, start: int, rank: int, ranks: int) -> Box:
    return Box(dtype=pointer(box), item_bytes=item_bytes(box), start=start, rank=rank, size=ranks)


def _register_put(target: GPUTarget) -> None:
    """Inputs: box, rows [A, h_r, W] or [B, H, L]. Output: the box, in place."""

    @trtp.register(PUT)
    def describe(box: trtp.TensorDesc, rows: trtp.TensorDesc, start: int) -> trtp.TensorDesc:
        return box.aliased()

    @trtp.aot_impl(PUT)
    def implement(
        box: trtp.TensorDesc, rows: trtp.TensorDesc, start: int, outputs: tuple[trtp.TensorDesc], tactic: int
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        count = rows.shape_expr.numel()
        return launch(compile_entry(put_entry(pointer(box), start), target), [trtp.cdiv(count, BLOCK)], [count])


def _register_exchange(target: GPUTarget) -> None:
    """Inputs: box, as dop_put left it, bases, owned [B] int32 (tokens, below A; -1: padding). Output: out [B, H, W]."""

    @trtp.register(EXCHANGE)
    def describe(
        box: trtp.TensorDesc,
        bases: trtp.TensorDesc,
        owned: trtp.TensorDesc,
        start: int,
        heads: int,
        width: int,
        rank: int,
        ranks: int,
    ) -> trtp.TensorDesc:
        return trtp.from_shape_expr((owned.shape_expr[0], heads, width), box.dtype)

    @trtp.aot_impl(EXCHANGE)
    def implement(
        box: trtp.TensorDesc,
        bases: trtp.TensorDesc,
        owned: trtp.TensorDesc,
        start: int,
        heads: int,
        width: int,
        rank: int,
        ranks: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        made = exchange_entry(_box(box, start, rank, ranks), heads, width)
        return launch(compile_entry(made, target), [PROGRAMS], [owned.shape_expr[0]])


def _register_return(target: GPUTarget) -> None:
    """Inputs: box, with [B, H, L] at start, bases, owner, place [A] int32: the token's rank (-1: padding) and its place
    among that rank's B. Output: out [A, own_heads, L]."""

    @trtp.register(RETURN)
    def describe(
        box: trtp.TensorDesc,
        bases: trtp.TensorDesc,
        owner: trtp.TensorDesc,
        place: trtp.TensorDesc,
        start: int,
        heads: int,
        first_head: int,
        own_heads: int,
        latent: int,
        rank: int,
        ranks: int,
    ) -> trtp.TensorDesc:
        return trtp.from_shape_expr((owner.shape_expr[0], own_heads, latent), box.dtype)

    @trtp.aot_impl(RETURN)
    def implement(
        box: trtp.TensorDesc,
        bases: trtp.TensorDesc,
        owner: trtp.TensorDesc,
        place: trtp.TensorDesc,
        start: int,
        heads: int,
        first_head: int,
        own_heads: int,
        latent: int,
        rank: int,
        ranks: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        made = return_entry(_box(box, start, rank, ranks), heads, first_head, own_heads, latent)
        return launch(compile_entry(made, target), [PROGRAMS], [owner.shape_expr[0]])
