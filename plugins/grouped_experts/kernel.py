"""Launches the Triton kernels of the routed experts, for few tokens (bound by reading weights) and for many (bound by
arithmetic).

T tokens, D hidden, I intermediate, k choices a token, E_r experts on this rank, P = T * k (token, choice) pairs. An
expert that any pair has chosen costs reading 6 D I bytes of 16-bit weights; a pair of an expert on this rank costs
6 D I operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from splash_plugins.grouped_experts import hopper_kernel
from splash_plugins.grouped_experts.device import limits
from splash_plugins.grouped_experts.few_kernel import few_down_kernel, few_gate_up_kernel
from splash_plugins.grouped_experts.pairs import PairSum
from splash_plugins.grouped_experts.product_kernel import combine_kernel, down_kernel, gate_up_kernel
from splash_plugins.grouped_experts.sort_kernel import SortedPairs, max_blocks, sort_pairs
from splash_plugins.grouped_experts.tiles import MAX_PAIRS, Plan, Tiles, choose, measured_pairs
from splash_plugins.overlap_kernel import overlap

COMBINE_BLOCK = 1024
Ready = Callable[[], None]


def grouped_experts(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    plan: Plan | None = None,
    ready: Ready | None = None,
    all_here: bool = False,
    defer: bool = False,
) -> PairSum | None:
    """As plugins/grouped_experts/reference.py's sum_of_experts; fills out [T, D], which may be addend itself.

    choice [T, k] int32, weight [T, k] float32, gate_up and down are contiguous, as are the rows of x, addend and out;
    x, gate_up, down, addend and out are all bfloat16, float16 or float32.
    plan: overrides the plan that was measured to be best for these shapes.
    ready: called once, before the first launch that reads addend. So another stream may write addend meanwhile, if
    ready makes the current stream wait for it.
    all_here: every pair's expert is on this rank, as where experts are cut inside; so each gets more rows than the
    plan's table would otherwise assume.
    defer: if all that is left is to sum the products of few tokens, ready is called, out is left as it is and the sum
    is returned for the next kernel to take. Else out is filled and None returned.
    """
    num_tokens, top_k = choice.shape
    if num_tokens == 0:
        return None
    num_experts, width, inner = down.shape
    assert choice.is_contiguous() and weight.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    device = limits(x.device)
    part = max(1, MAX_PAIRS // top_k)
    for begin in range(0, num_tokens, part):
        rows = slice(begin, min(num_tokens, begin + part))
        sizes = (rows.stop - begin, top_k, num_experts, width, inner, x.element_size())
        chosen = plan or choose(*sizes, device, all_here)
        tail = addend[rows] if addend is not None else None
        pairs = measured_pairs(choice[rows].numel(), all_here)
        fits = plan is None and hopper_kernel.is_chosen(x[rows], gate_up, down, pairs)
        rest = (x[rows], choice[rows], weight[rows], gate_up, down, first_expert, tail, out[rows], ready)
        if chosen.few:
            left = _few(chosen, *rest, defer=defer and num_tokens <= part)
            if left is not None:
                return left
        else:
            _many(None if fits else chosen, *rest)
        ready = None
    return None


def _weights(w: torch.Tensor, tiles: Tiles) -> torch.Tensor | TensorDescriptor:
    """w [E_r, columns, depth] in the form that the product kernels take: a descriptor if tiles.tma, else itself."""
    return TensorDescriptor.from_tensor(w.flatten(0, -2), [tiles.n, tiles.k]) if tiles.tma else w


def _blocks(tiles: Tiles, dtype: torch.dtype) -> dict[str, object]:
    """The constants and launch options that all product kernels have in common."""
    return {
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "TMA": tiles.tma,
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _few(
    plan: Plan,
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    ready: Ready | None,
    defer: bool,
) -> PairSum | None:
    num_pairs, top_k = choice.numel(), choice.shape[1]
    num_experts, width, inner = down.shape
    by_pair = num_pairs <= num_experts
    candidates = num_pairs if by_pair else num_experts
    found = {"PAIRS": max(16, triton.next_power_of_2(num_pairs)), "BY_PAIR": by_pair}
    where = (choice, num_pairs, first_expert, num_experts)
    hidden = x.new_empty((num_pairs, inner))
    few_gate_up_kernel[(triton.cdiv(inner, plan.gate_up.n), candidates)](
        x, x.stride(0), _weights(gate_up, plan.gate_up), hidden, *where,
        DEPTH=width, INNER=inner, TOP_K=top_k, **found, **_blocks(plan.gate_up, x.dtype),
        **overlap(x, after_join=_joined(addend, ready)),
    )  # fmt: skip
    columns = triton.cdiv(width, plan.down.n)
    w = _weights(down, plan.down)
    sizes = {"INNER": inner, "WIDTH": width, **_blocks(plan.down, x.dtype)}
    y = x.new_empty((num_pairs, width))
    few_down_kernel[(columns, candidates)](hidden, w, y, *where, **found, **sizes, **overlap(x))
    if not defer:
        combine(y, choice, weight, first_expert, num_experts, addend, out, ready=ready)
        return None
    if ready is not None:
        ready()
    return PairSum(y, choice, weight, first_expert, num_experts, addend, joined=ready is not None)


def _many(
    plan: Plan | None,
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    ready: Ready | None,
) -> None:
    """Sorts pairs by expert, then computes the products, with Hopper's kernel if plan is None, and sums them."""
    num_experts, top_k = len(down), choice.shape[1]
    rows = hopper_kernel.ROWS if plan is None else plan.gate_up.m
    order = sort_pairs(choice, num_experts, first_expert, rows, after_join=_joined(addend, ready))
    if plan is None:
        y = hopper_kernel.products(x, gate_up, down, order, top_k)
    else:
        y = _products(plan, x, gate_up, down, order, top_k)
    combine(y, choice, weight, first_expert, num_experts, addend, out, ready=ready)


def _products(
    plan: Plan, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, order: SortedPairs, top_k: int
) -> torch.Tensor:
    """As hopper_kernel.products, with the portable kernels."""
    num_pairs, (num_experts, width, inner) = len(order.pairs), down.shape
    assert plan.gate_up.m == plan.down.m, "both products share one table of blocks"
    table = (order.pairs, order.blocks, order.num_blocks)
    processors = limits(x.device).processors

    def programs(tiles: Tiles, columns: int) -> tuple[int]:
        most = max_blocks(num_pairs, num_experts, tiles.m) * triton.cdiv(columns, tiles.n)
        return (min(most, processors * tiles.per_processor),)

    hidden = x.new_empty((num_pairs, inner))
    gate_up_kernel[programs(plan.gate_up, inner)](
        x, x.stride(0), _weights(gate_up, plan.gate_up), hidden, *table, plan.gate_up.group,
        DEPTH=width, INNER=inner, TOP_K=top_k, **_blocks(plan.gate_up, x.dtype), **overlap(x),
    )  # fmt: skip
    y = x.new_empty((num_pairs, width))
    down_kernel[programs(plan.down, width)](
        hidden,
        _weights(down, plan.down),
        y,
        *table,
        plan.down.group,
        INNER=inner,
        WIDTH=width,
        **_blocks(plan.down, x.dtype),
        **overlap(x),
    )
    return y


def combine(
    y: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    first_expert: int,
    num_experts: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    row: torch.Tensor | None = None,
    ready: Ready | None = None,
) -> None:
    """out [T, D] = addend [T, D] + sum of weight * y [P, D] over each token's experts on this rank.

    row [P] int32: the row of y that each pair has; None: pair p has row p. ready: as in grouped_experts.
    """
    if ready is not None:
        ready()
    num_tokens, top_k = choice.shape
    width = y.shape[1]
    block = min(COMBINE_BLOCK, triton.next_power_of_2(width))
    combine_kernel[(num_tokens, triton.cdiv(width, block))](
        y, row, choice, weight, addend, _row_stride(addend), out, out.stride(0), first_expert, num_experts,
        WIDTH=width, TOP_K=top_k, BLOCK=block, num_warps=max(1, block // 256),
        **overlap(y, after_join=ready is not None),
    )  # fmt: skip


def _joined(addend: torch.Tensor | None, ready: Ready | None) -> bool:
    """Whether the stream may just have waited for another one, that writes addend (overlap_kernel.overlap)."""
    return addend is not None and ready is None


def _row_stride(x: torch.Tensor | None) -> int:
    return x.stride(0) if x is not None else 0
