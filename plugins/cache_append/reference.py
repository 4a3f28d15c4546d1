"""Write new cache rows into their pages.

W = L + R numbers a row, n rows.
"""

from __future__ import annotations

import torch


def append_rows(pages: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """pages [num_pages, page_tokens, W] of one layer, in place; rows [n, W]; page, offset [n] int32; page -1 stores
    nothing."""
    kept = page >= 0
    count = int(kept.sum())
    if count == len(page):
        pages[page, offset] = rows
    elif count:
        pages[page[kept], offset[kept]] = rows[kept]


def gather_rows(pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, out: torch.Tensor) -> None:
    """The inverse: fills out [C, W] with pages[page, offset]; page, offset [C] int32, zeros where page is -1."""
    out.copy_(torch.where((page >= 0)[:, None], pages[page.clamp(min=0).long(), offset.long()], 0))
