"""Copies whole cache pages between pools of the same page size, from a peer's into this rank's or within one, in plain
torch.

P pages of N numbers (all layers of a page lie together), n pages to copy.
"""

from __future__ import annotations

import torch


def page_transfer(source: torch.Tensor, taken: torch.Tensor, pool: torch.Tensor, placed: torch.Tensor) -> None:
    """pool[placed[i]] = source[taken[i]], in place; nothing where placed[i] is -1.

    source [P', N], pool [P, N]; taken, placed [n] int32. source may be pool itself if no page is in both taken and
    placed.
    """
    kept = placed >= 0
    pool[placed[kept].long()] = source[taken[kept].long()]
