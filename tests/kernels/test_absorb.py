"""Absorbing queries against plain torch."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.absorb import reference
from splash_plugins.absorb.kernel import MOST_QUERIES, absorb

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("queries", [0, 1, 5, 33, MOST_QUERIES + 1])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads, nope, latent, rope", [(3, 24, 48, 16), (1, 5, 32, 6), (2, 64, 40, 2)])
def test_absorb(device: str, queries: int, interleaved: bool, heads: int, nope: int, latent: int, rope: int) -> None:
    g = torch.Generator().manual_seed(queries)
    # A slice of the heads of wider tensors.
    q = torch.randn(queries, heads + 2, nope + rope, generator=g).to(device)[:, 1 : heads + 1]
    w = torch.randn(heads, nope, latent, generator=g).to(device)
    angle = torch.randn(queries, rope // 2, generator=g).to(device) * 9
    got, want = (torch.full((queries, heads + 1, latent + rope), -77.0, device=device) for _ in range(2))
    before = q.clone()
    reference.absorb(q, angle.cos(), angle.sin(), interleaved, w, want[:, :heads])
    absorb(q, angle.cos(), angle.sin(), interleaved, w, got[:, :heads])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(q, before), "queries that attend expanded are rotated later, where they stand"
