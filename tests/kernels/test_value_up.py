"""From attention to values against plain torch."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.mla_attention.decode_kernel import DecodeConfig
from splash_plugins.value_up import reference
from splash_plugins.value_up.kernel import MOST_QUERIES, decode_values, value_up
from tests.kernels.test_mla_decode import SCALE, UNCUT, make

pytestmark = pytest.mark.kernels

CONFIG = DecodeConfig(block_h=16, block_n=32, num_warps=4, num_stages=1)


@pytest.mark.parametrize("queries", [0, 1, 5, 20, MOST_QUERIES + 1])
@pytest.mark.parametrize("heads, latent, value", [(3, 48, 40), (1, 32, 64), (2, 16, 6)])
def test_value_up(device: str, queries: int, heads: int, latent: int, value: int) -> None:
    g = torch.Generator().manual_seed(queries)
    latents = torch.randn(queries, heads + 1, latent + 3, generator=g).to(device)[:, :heads, :latent]
    w = torch.randn(heads, value, latent, generator=g).to(device)
    got, want = (torch.full((queries, heads + 1, value), -77.0, device=device) for _ in range(2))
    reference.value_up(latents, w, want[:, :heads])
    value_up(latents, w, got[:, :heads])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [None, 1, 2, UNCUT])
@pytest.mark.parametrize("fuse", [None, False, True])
@pytest.mark.parametrize("lengths", [[], [200], [0, 130, 1], [0, 1, 63, 64, 65, 11 * 64 + 1, 0]])
def test_decode_values(device: str, lengths: list[int], fuse: bool | None, size: int | None) -> None:
    """Heads in two blocks."""
    case = make(lengths, heads=5, device=device)
    g = torch.Generator().manual_seed(1)
    w = [torch.randn(n, 40, case.latent, generator=g).to(device) for n in (2, 3)]
    got, want = (torch.full((len(lengths), 6, 40), -77.0, device=device) for _ in range(2))
    index = (case.q, case.pages, case.tables, case.slot, case.first, case.length)
    index = (*index, case.parts(size), case.stride, case.latent, SCALE)
    reference.decode_values(*index, w, want[:, :5])
    decode_values(*index, w, got[:, :5], config=CONFIG, fuse=fuse)
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("queries", [2, 20])
def test_no_heads(device: str, queries: int) -> None:
    """Of queries of a rank that has none."""
    case = make([300] * queries, heads=0, device=device)
    index = (case.q, case.pages, case.tables, case.slot, case.first, case.length, case.parts(), case.stride)
    w, out = torch.zeros(0, 40, case.latent, device=device), torch.full((queries, 1, 40), -77.0, device=device)
    decode_values(*index, case.latent, SCALE, [w], out[:, :0])
    assert (out == -77).all()
