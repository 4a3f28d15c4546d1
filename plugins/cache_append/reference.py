"""Write new cache rows into their pages.

W = L + R numbers a row, n rows.
"""

from __future__ import annotations

import torch


def cache_append(pages: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """pages [num_pages, page_tokens, W] of one layer, in place; rows [n, W]; page, offset [n] int64."""
    pages[page, offset] = rows
