"""The operations that a step's program is made of, as one table: plain torch in kernels_reference.py, a
GPU's kernels in kernels_cuda.py. A program calls what the table holds and knows nothing of who is behind it.

Signatures and shapes are those of the references in plugins/<name>/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.pairs import PairSum


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """By operation. They fill tensors that they are given, but for those whose types say what they return."""

    embed: Callable[..., None]
    add_norm: Callable[..., None]
    project_in: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """x [T, D] and w [Q + W, D] to [T, Q + W]: `linear` for the latents of queries and cache rows."""
    latent_rows: Callable[..., None]
    rope_q: Callable[..., None]
    absorb: Callable[..., None]
    append: Callable[..., None]
    decode: Callable[..., None]
    decode_values: Callable[..., None]
    value_up: Callable[..., None]
    gather: Callable[..., None]
    prefill: Callable[..., None]
    route: Callable[..., None]
    choose: Callable[..., None]
    """`route` from logits, for who makes these by other means."""
    grouped_experts: Callable[..., PairSum | None]
    """Fills nothing where it defers the sum, which only some do and only if asked to."""
    linear: Callable[..., None]
    linear_parts: Callable[[torch.Tensor, torch.Tensor], PartSum | None]
    """`linear` of x [T, K] and w [N, K], left to sum; None, and nothing done, where that does not pay."""
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
