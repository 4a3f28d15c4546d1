"""Rotating queries in place against plain torch."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.rope_q import reference
from splash_plugins.rope_q.kernel import rope_q

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("tokens, absorbed_tokens", [(0, None), (1, 1), (5, None), (5, 0), (5, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads, nope, rope", [(3, 24, 16), (40, 5, 6), (1, 8, 2)])
def test_rope_q(
    device: str, tokens: int, absorbed_tokens: int | None, interleaved: bool, heads: int, nope: int, rope: int
) -> None:
    generator = torch.Generator(device).manual_seed(tokens)
    # A slice of the heads of a wider tensor.
    whole = torch.randn(tokens, heads + 2, nope + rope, generator=generator, device=device)
    q = whole[:, 1 : heads + 1]
    angle = torch.randn(tokens, rope // 2, generator=generator, device=device) * 9
    absorbed = None
    if absorbed_tokens is not None:
        absorbed = torch.randn(absorbed_tokens, heads, 32 + rope, generator=generator, device=device)
    want_whole = whole.clone()
    want = None if absorbed is None else absorbed.clone()
    reference.rope_q(want_whole[:, 1 : heads + 1], angle.cos(), angle.sin(), interleaved, nope, want)
    rope_q(q, angle.cos(), angle.sin(), interleaved, nope, absorbed)
    torch.testing.assert_close(whole, want_whole, rtol=1e-6, atol=1e-6)
    if want is not None:
        torch.testing.assert_close(absorbed, want, rtol=1e-6, atol=1e-6)
