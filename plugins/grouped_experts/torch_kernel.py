"""The routed experts by torch.nn.functional.grouped_mm (CUTLASS on Hopper and Blackwell), for many tokens.

T tokens, D hidden, I intermediate, k choices a token, E_r experts on this rank, P = T * k pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from splash_plugins.grouped_experts.gather_kernel import gather_rows
from splash_plugins.grouped_experts.kernel import Ready, combine
from splash_plugins.grouped_experts.sort_kernel import sort_pairs
from splash_plugins.grouped_experts.tiles import MAX_PAIRS
from splash_plugins.silu_mul.kernel import silu_mul

ALIGNMENT = 16  # bytes; rows must be multiples of it
MAX_EXPERTS = 1024


def is_supported(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether grouped_experts below takes these weights: aligned bfloat16 ones of fewer than MAX_EXPERTS experts, if
    this torch has grouped_mm."""
    aligned = all(size * down.element_size() % ALIGNMENT == 0 for size in down.shape[1:])
    return hasattr(F, "grouped_mm") and down.dtype is torch.bfloat16 and aligned and len(down) < MAX_EXPERTS


def grouped_experts(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    ready: Ready | None = None,
    defer: bool = False,
) -> None:
    """As kernel.py's grouped_experts, but nothing is ever deferred. Offsets stay on the device, so that a graph can
    capture it."""
    num_tokens, top_k = choice.shape
    if num_tokens == 0:
        return
    part = max(1, MAX_PAIRS // top_k)
    for begin in range(0, num_tokens, part):
        rows = slice(begin, min(num_tokens, begin + part))
        tail = addend[rows] if addend is not None else None
        _part(x[rows], choice[rows], weight[rows], gate_up, down, first_expert, tail, out[rows], ready)
        ready = None


def _part(
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
    num_experts = len(down)
    joined = addend is not None and ready is None
    order = sort_pairs(choice, num_experts, first_expert, block_m=128, after_join=joined)
    count = order.ends[-1:]
    rows, place = gather_rows(x, order.pairs, count, choice.shape[1])
    w = gate_up.flatten(1, -2) if gate_up.dim() == 4 else gate_up
    products = F.grouped_mm(rows, w.transpose(-2, -1), offs=order.ends)
    hidden = silu_mul(products, count)
    y = F.grouped_mm(hidden, down.transpose(-2, -1), offs=order.ends)
    combine(y, choice, weight, first_expert, num_experts, addend, out, place, ready)
