"""The bytes of one rank's cache pages. A page is [layers, page_tokens, L + R]: latent part, then the rotated key."""

from __future__ import annotations

import torch

from splash_trt.memory.arena import Arena
from splash_trt.models.config import ModelConfig


class PageStorage:
    """`pages` is [num_pages, layers, page_tokens, L + R] over the arena."""

    def __init__(self, arena: Arena, model: ModelConfig, page_tokens: int, dtype: torch.dtype) -> None:
        self.page_tokens = page_tokens
        self.pages = arena.pages((model.num_layers, page_tokens, model.row_width), dtype)

    def layer(self, index: int) -> torch.Tensor:
        """[num_pages, page_tokens, L + R], a strided view."""
        return self.pages[:, index]

    def rows(self, page: int, first: int, count: int) -> torch.Tensor:
        """[layers, count, L + R]: rows first … first + count - 1 of a page, a view."""
        return self.pages[page, :, first : first + count]
