"""The embedding of ids that the host knows and of those that only the device does."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.embed import reference
from splash_plugins.embed.kernel import embed

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65])
@pytest.mark.parametrize("width", [40, 1030])
@pytest.mark.parametrize("first_id", [0, 50])
def test_agrees(device: str, num_tokens: int, width: int, first_id: int) -> None:
    torch.manual_seed(num_tokens)
    ids = torch.randint(-1, 100, (num_tokens,), dtype=torch.int32, device=device)
    slot = torch.randint(-1, 8, (num_tokens,), dtype=torch.int32, device=device)
    last = torch.randint(0, 100, (8,), device=device)
    table = torch.randn(50, width, device=device)
    got = torch.full((num_tokens, width), torch.nan, device=device)
    want = torch.empty_like(got)
    embed(ids, slot, last, table, first_id, got)
    reference.embed(ids, slot, last, table, first_id, want)
    assert torch.equal(got, want)


def test_each_kind_of_row(device: str) -> None:
    def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    table = torch.arange(10.0, 15.0, device=device)[:, None].expand(5, 4).contiguous()
    # Here, below, above, sampled here, sampled elsewhere, padding, padding's slot with an id.
    ids, slot = ints(12, 9, 15, -1, -1, -1, 10), ints(0, 1, 2, 1, 2, -1, -1)
    out = torch.full((7, 4), torch.nan, device=device)
    embed(ids, slot, ints(3, 14, 99, dtype=torch.int64), table, 10, out)
    assert out[:, 0].tolist() == [12, 0, 0, 14, 0, 0, 10]
    assert torch.equal(out, out[:, :1].expand(7, 4))
