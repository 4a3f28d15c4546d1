"""Writes new cache rows into their pages, and reads rows from them, in plain torch.

W = L + R numbers a row, n rows.
"""

from __future__ import annotations

import torch


def append_rows(pages: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """pages[page[i], offset[i]] = rows[i], in place; nothing where page[i] is -1.

    pages [num_pages, page_tokens, W] of one layer; rows [n, W]; page, offset [n] int32.
    """
    kept = page >= 0
    count = int(kept.sum())
    if count == len(page):
        pages[page, offset] = rows
    elif count:
        pages[page[kept], offset[kept]] = rows[kept]


def gather_rows(pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = pages[page[i], offset[i]]; zeros where page[i] is -1. out [C, W]; page, offset [C] int32."""
    out.copy_(torch.where((page >= 0)[:, None], pages[page.clamp(min=0).long(), offset.long()], 0))
