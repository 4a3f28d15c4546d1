"""The residual's norm against plain torch."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.norm import reference
from splash_plugins.norm.kernel import add_norm

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("size", [16, 96, 129])
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_norm(device: str, tokens: int, size: int, with_delta: bool) -> None:
    generator = torch.Generator(device).manual_seed(size)
    # Rows of a wider tensor: strides differ from the size.
    hidden = torch.randn(tokens, size + 3, generator=generator, device=device)[:, :size]
    delta = torch.randn(tokens, size, generator=generator, device=device) if with_delta else None
    weight = torch.randn(size, generator=generator, device=device)
    out = torch.full((tokens, size + 7), torch.nan, device=device)[:, :size]
    want_hidden, want = hidden.clone(), torch.empty_like(hidden)
    reference.add_norm(want_hidden, delta, weight, 1e-5, want)
    add_norm(hidden, delta, weight, 1e-5, out)
    torch.testing.assert_close(hidden, want_hidden, rtol=0, atol=0)
    torch.testing.assert_close(out, want, rtol=2e-6, atol=2e-6)


def test_add_norm_rounds_as_torch(device: str) -> None:
    """In half precision the sum, the normed row and the product are each rounded."""
    generator = torch.Generator(device).manual_seed(1)
    hidden, delta = (torch.randn(8, 64, generator=generator, device=device).half() for _ in range(2))
    weight = torch.randn(64, generator=generator, device=device).half()
    want_hidden, want, out = hidden.clone(), torch.empty_like(hidden), torch.empty_like(hidden)
    reference.add_norm(want_hidden, delta, weight, 1e-5, want)
    add_norm(hidden, delta, weight, 1e-5, out)
    assert torch.equal(hidden, want_hidden)
    # A sum in another order may round one number in a thousand to its neighbour.
    assert (out != want).float().mean() < 0.01
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
