"""Where there is no L2 to fetch into: nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def fetch_list(tensors: Sequence[torch.Tensor], most_bytes: int) -> torch.Tensor | None:
    """[n, 2] int64, address and bytes, on their device: what `fetch` takes to fetch these contiguous tensors, as far as
    most_bytes go; None where it cannot."""
    return None


def fetch(pieces: torch.Tensor) -> None:
    """Has the memory fetched into the L2 while what comes next goes on."""
    raise AssertionError("there is no list to fetch")
