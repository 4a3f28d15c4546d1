"""A gated MLP's activation, kernel against plain torch."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.silu_mul import reference
from splash_plugins.silu_mul.kernel import silu_mul

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65])
@pytest.mark.parametrize("inner", [1, 24, 1030])
def test_agrees(device: str, num_tokens: int, inner: int) -> None:
    x = torch.randn(num_tokens, 2 * inner, device=device) * 4
    torch.testing.assert_close(silu_mul(x), reference.silu_mul(x))


def test_strided_rows_and_extremes(device: str) -> None:
    x = torch.randn(5, 50, device=device)[:, :40]
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    torch.testing.assert_close(silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("rows", [0, 2, 9])
def test_rows_past_the_device_side_number_cost_nothing(device: str, rows: int) -> None:
    x = torch.randn(6, 32, device=device)
    x[rows:] = torch.nan
    got = silu_mul(x, torch.tensor([rows], dtype=torch.int32, device=device))
    torch.testing.assert_close(got[:rows], reference.silu_mul(x[:rows]))
