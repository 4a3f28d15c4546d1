"""Copies pieces between addresses of this process's host memory."""

from __future__ import annotations

import ctypes

import torch


def piece_copy(pieces: torch.Tensor, unit: int, programs: int) -> None:
    """pieces [n, 3] int64, on the host: source address, target address, bytes; no target overlaps another piece.

    unit: a number of bytes that divides every number in pieces, so that kernels may read so much at once. programs: how
    many programs a kernel has; unused here.
    """
    assert pieces.device.type == "cpu" and not (pieces % unit).any(), unit
    for source, target, num_bytes in pieces.tolist():
        ctypes.memmove(target, source, num_bytes)
