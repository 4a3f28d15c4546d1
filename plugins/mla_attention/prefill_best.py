"""Prefill attention by the faster kernel: the one written for Hopper where it supports the inputs, else the portable
one."""

from __future__ import annotations

import torch

from splash_plugins.mla_attention import prefill_hopper_kernel, prefill_kernel


def prefill(
    q: torch.Tensor,
    position: torch.Tensor,
    rows: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    segments: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    merge: bool,
) -> None:
    """As prefill_kernel.prefill. What lies past a segment's keys may be NaN or infinite with both kernels: scores there
    are masked, and values are replaced by zeros (the portable kernel masks its loads, Hopper's clears its copy)."""
    hopper = prefill_hopper_kernel.supports(q, rows, k_nope, v)
    chosen = prefill_hopper_kernel.prefill if hopper else prefill_kernel.prefill
    chosen(q, position, rows, k_nope, v, segments, tiles, scale, out, lse, merge)
