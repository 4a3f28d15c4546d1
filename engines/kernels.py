"""The operations that a step's program is made of, as a table of functions. kernels_reference.py fills it with plain
torch, kernels_cuda.py with a GPU's kernels; a program calls the table's functions and does not know which they are.

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
    """One function for each operation. They fill tensors that they are given, except those whose types say that they
    return something."""

    embed: Callable[..., None]
    add_norm: Callable[..., None]
    project_in: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """x [T, D] and w [Q + W, D] to [T, Q + W]: the product for the latents of queries and cache rows."""
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
    """`route` from logits, for kernels that only compute those."""
    grouped_experts: Callable[..., PairSum | None]
    """Returns a sum and fills nothing if it defers the sum, which it must be asked to (defer) and not all do."""
    linear: Callable[..., None]
    linear_parts: Callable[[torch.Tensor, torch.Tensor], PartSum | None]
    """`linear` of x [T, K] and w [N, K], returned in parts that are still to be summed; None, and nothing is done, if
    that does not pay."""
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
