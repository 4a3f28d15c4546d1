"""The launchers of lse_merge, cache_append and page_transfer against their references."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.cache_append import kernel as append_kernel
from splash_plugins.cache_append import reference as append_reference
from splash_plugins.lse_merge import kernel as merge_kernel
from splash_plugins.lse_merge import reference as merge_reference
from splash_plugins.page_transfer import kernel as transfer_kernel
from splash_plugins.page_transfer import reference as transfer_reference

pytestmark = pytest.mark.kernels


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("parts", "shape"), [(1, (3, 2, 16)), (2, (5, 3, 48)), (4, (1, 1, 64)), (2, (0, 3, 16))])
def test_lse_merge(device: str, parts: int, shape: tuple[int, int, int]) -> None:
    outs = torch.randn((parts, *shape), device=device)
    lses = 30 * torch.randn((parts, *shape[:2]), device=device)
    lses[torch.rand(lses.shape, device=device) < 0.3] = -torch.inf
    expected = merge_reference.lse_merge(outs, lses)
    outs[lses == -torch.inf] = torch.nan
    for got, want in zip(merge_kernel.lse_merge(outs, lses), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_append_rows(device: str, dtype: torch.dtype, count: int) -> None:
    pool = torch.randn((5, 3, 4, 24), device=device).to(dtype)
    expected = pool.clone()
    rows = torch.randn((count, 30), device=device).to(dtype)[:, :24]  # a strided view
    page, offset = ints([4, -1, 0, 0, 2, 1][:count], device), ints([3, 2, 0, 1, 2, 0][:count], device)
    append_reference.append_rows(expected[:, 1], rows, page, offset)
    append_kernel.append_rows(pool[:, 1], rows, page, offset)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("size", [10, 4096, 5000])
def test_page_transfer(device: str, size: int) -> None:
    source, pool = torch.randn((4, size), device=device), torch.randn((6, size), device=device)
    expected = pool.clone()
    taken, placed = ints([3, 0, 1], device), ints([5, -1, 0], device)
    transfer_reference.page_transfer(source, taken, expected, placed)
    transfer_kernel.page_transfer(source, taken, pool, placed)
    assert torch.equal(pool, expected)


def test_page_transfer_within_a_pool(device: str) -> None:
    pool = torch.randn((6, 100), device=device)
    expected = pool.clone()
    expected[[1, 2]] = pool[[4, 5]]
    transfer_kernel.page_transfer(pool, ints([4, 5], device), pool, ints([1, 2], device))
    assert torch.equal(pool, expected)
