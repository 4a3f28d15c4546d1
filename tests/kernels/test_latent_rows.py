"""Latents and cache rows against plain torch: what is written, and what is left alone."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.latent_rows import reference
from splash_plugins.latent_rows.kernel import latent_rows

pytestmark = pytest.mark.kernels

EPS = 1e-6
POISON = -77.0


def run(function, tensors: dict[str, torch.Tensor | None], interleaved: bool, q: int, latent: int, rope: int):  # type: ignore[no-untyped-def]
    qkv = tensors["qkv"]
    assert qkv is not None
    num_tokens = len(qkv)
    out = torch.full((num_tokens, q + 1), POISON, device=qkv.device)[:, :q] if q else None
    rows = torch.full((num_tokens, latent + rope + 1), POISON, device=qkv.device)[:, : latent + rope]
    # One layer of an arena of two.
    arena = torch.full((7, 2, 4, latent + rope), POISON, device=qkv.device)
    names = ("page", "offset", "target_page", "target_offset")
    function(
        qkv,
        tensors["q_norm"],
        tensors["kv_norm"],
        EPS,
        tensors["cos"],
        tensors["sin"],
        interleaved,
        out,
        rows,
        arena[:, 1],
        *(tensors[name] for name in names),
    )
    return out, rows, arena


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("q, latent, rope", [(48, 32, 16), (0, 24, 6), (130, 16, 2)])
@pytest.mark.parametrize("with_target", [False, True])
def test_latent_rows(
    device: str, tokens: int, interleaved: bool, q: int, latent: int, rope: int, with_target: bool
) -> None:
    g = torch.Generator().manual_seed(tokens + q)
    angle = torch.randn(tokens, rope // 2, generator=g) * 9
    places = torch.randperm(7 * 4, generator=g)[: 2 * tokens].view(2, tokens)
    page, offset = places // 4, places % 4
    page[0, 1::3] = -1  # another rank's
    page[1, ::2] = -1
    tensors: dict[str, torch.Tensor | None] = {
        "qkv": torch.randn(tokens, q + latent + rope + 3, generator=g)[:, : q + latent + rope],
        "q_norm": torch.randn(q, generator=g) if q else None,
        "kv_norm": torch.randn(latent, generator=g),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "page": page[0].int(),
        "offset": offset[0].int(),
        "target_page": page[1].int() if with_target else None,
        "target_offset": offset[1].int() if with_target else None,
    }
    tensors = {name: None if t is None else t.to(device) for name, t in tensors.items()}
    got = run(latent_rows, tensors, interleaved, q, latent, rope)
    want = run(reference.latent_rows, tensors, interleaved, q, latent, rope)
    for mine, expected in zip(got, want, strict=True):
        if expected is not None:
            torch.testing.assert_close(mine, expected, rtol=2e-6, atol=2e-6)
    if tokens:
        assert (got[2] != POISON).any(), "nothing was written to a page"
