"""Ranks wait for each other block by block, so that a kernel's grid has to be the same on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splash_plugins.peer_rows import kernel
from splash_trt.dist.rank_sum import even_split
from splash_trt.runtime.mailbox import Mapped, mailbox_bytes
from splash_trt.runtime.peers_cuda import CudaPeers

pytestmark = pytest.mark.kernels
HALF, LATENT = 16 << 20, 512


class Launches:
    """In place of a kernel: how it is launched."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.grids.append(grid)


@pytest.mark.parametrize(
    ("heads", "size"),
    [(33, 2), (50, 3), (20, 3), (128, 8), (5, 8), pytest.param(1, 4, id="ranks without heads")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exchanges_have_one_grid(monkeypatch: pytest.MonkeyPatch, heads: int, size: int, dtype: torch.dtype) -> None:
    split, found = even_split(heads, size), []
    for rank in range(size):
        there, back = Launches(), Launches()
        monkeypatch.setattr(kernel, "to_owners_kernel", there)
        monkeypatch.setattr(kernel, "pick_rows_kernel", back)
        memory = torch.zeros(mailbox_bytes(HALF), dtype=torch.uint8)
        peers = CudaPeers(rank, Mapped(memory, [memory.data_ptr()] * size), HALF)
        for tokens in (1, 9):
            places = torch.zeros(tokens, dtype=torch.int32)
            peers.to_owners(peers.buffer((tokens, split[rank], LATENT + 64), dtype), places, split)
            got = peers.to_heads(peers.buffer((tokens, heads, LATENT), dtype), places, places, split)
            assert got.shape == (tokens, split[rank], LATENT)
        found.append((there.grids, back.grids))
    assert found == [found[0]] * size
