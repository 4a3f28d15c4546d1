"""The operations that a step's program is made of, as one table: plain torch in kernels_reference.py, a
GPU's kernels in kernels_cuda.py. A program calls what the table holds and knows nothing of who is behind it.

Signatures and shapes are those of the references in plugins/<name>/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """By operation. All but `gated` fill tensors that they are given."""

    embed: Callable[..., None]
    add_norm: Callable[..., None]
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
    grouped_experts: Callable[..., None]
    linear: Callable[..., None]
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
