"""Products of few rows against plain torch."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.few_rows import reference
from splash_plugins.few_rows.kernel import MOST_ROWS, cut_of, gated, linear
from splash_plugins.few_rows.parts_kernel import MOST_PARTS, PART, linear_parts
from splash_plugins.few_rows.parts_kernel import MOST_ROWS as MOST_PARTED

pytestmark = pytest.mark.kernels
DTYPE = torch.float16


@pytest.mark.parametrize("rows", [0, 1, 5, 17, MOST_ROWS + 1])
@pytest.mark.parametrize("depth, columns", [(24, 40), (512, 16), (600, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear(device: str, rows: int, depth: int, columns: int, transposed: bool) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 3, generator=g).to(device, DTYPE)[:, :depth]
    shape = (depth, columns) if transposed else (columns, depth)
    w = (torch.randn(shape, generator=g) / depth**0.5).to(device, DTYPE)
    w = w.t() if transposed else w
    got, want = (torch.full((rows, columns + 1), -77.0, device=device, dtype=DTYPE) for _ in range(2))
    reference.linear(x, w, want[:, :columns])
    linear(x, w, got[:, :columns], columns=8)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("depth, columns, cut", [(1024, 20, (16, 8)), (600, 1030, (32, 4)), (600, 20, (0, 8))])
def test_linear_as_it_is_cut(device: str, depth: int, columns: int, cut: tuple[int, int]) -> None:
    assert cut_of(3, depth, columns) == cut
    g = torch.Generator().manual_seed(depth)
    x = torch.randn(3, depth, generator=g).to(device, DTYPE)
    w = (torch.randn(columns, depth, generator=g) / depth**0.5).to(device, DTYPE)
    got, want = (torch.full((3, columns + 1), -77.0, device=device, dtype=DTYPE) for _ in range(2))
    reference.linear(x, w, want[:, :columns])
    linear(x, w, got[:, :columns])
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [0, 1, 17, MOST_ROWS + 1])
@pytest.mark.parametrize("depth, inner", [(24, 20), (600, 8)])
def test_gated(device: str, rows: int, depth: int, inner: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 3, generator=g).to(device, DTYPE)[:, :depth]
    gate_up = (torch.randn((2, inner, depth), generator=g) / depth**0.5).to(device, DTYPE)
    torch.testing.assert_close(gated(x, gate_up, columns=8), reference.gated(x, gate_up), rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [1, 5, MOST_PARTED])
@pytest.mark.parametrize("depth, columns", [(1280, 200), (600, 130)])
def test_linear_parts(device: str, rows: int, depth: int, columns: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 3, generator=g).to(device, DTYPE)[:, :depth]
    w = (torch.randn((depth, columns), generator=g) / depth**0.5).to(device, DTYPE).t()
    left = linear_parts(x, w)
    assert left is not None and left.shape == (rows, columns) and left.y.dtype is torch.float32
    for part in range(left.y.shape[1]):
        k = slice(PART * part, PART * (part + 1))
        torch.testing.assert_close(left.y[:, part], x[:, k].float() @ w[:, k].t().float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("what", ["rows", "no rows", "one part", "parts", "columns", "by rows", "float32"])
def test_what_has_no_parts(device: str, what: str) -> None:
    rows = {"rows": MOST_PARTED + 1, "no rows": 0}.get(what, 3)
    depth = {"one part": PART, "parts": MOST_PARTS * PART + 1}.get(what, 600)
    columns = 128 if what == "columns" else 200
    dtype = torch.float32 if what == "float32" else DTYPE
    w = torch.zeros((depth, columns), dtype=dtype, device=device).t()
    w = w.contiguous() if what == "by rows" else w
    assert linear_parts(torch.zeros((rows, depth), dtype=dtype, device=device), w) is None
