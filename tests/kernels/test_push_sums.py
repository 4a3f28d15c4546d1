"""Kernels that push rows and sum a token's experts or a product's parts on the way, alone: the bits of the sum first,
the rest after it."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.kernel import combine
from splash_plugins.grouped_experts.pairs import PairSum
from splash_trt.runtime.mailbox import Mapped, mailbox_bytes
from splash_trt.runtime.peers_cuda import CudaPeers

pytestmark = pytest.mark.kernels
HALF, FIRST, LOCAL, EXPERTS, EPS = 1 << 20, 3, 4, 11, 1e-5


def alone(device: str) -> CudaPeers:
    memory = torch.zeros(mailbox_bytes(HALF), dtype=torch.uint8, device=device)
    return CudaPeers(0, Mapped(memory, [memory.data_ptr()]), HALF, num_blocks=3)


def pairs(device: str, dtype: torch.dtype, rows: int, width: int, top_k: int, addend: bool) -> PairSum:
    """Row 0 has no expert here, and what belongs to other ranks was never written."""
    torch.manual_seed(rows)
    choice = torch.randint(-1, EXPERTS, (rows, top_k), dtype=torch.int32)
    choice[0] = torch.arange(top_k) % FIRST
    y = torch.randn(rows * top_k, width)
    y[((choice < FIRST) | (choice >= FIRST + LOCAL)).flatten()] = torch.nan
    more = torch.randn(rows, width + 8)[:, :width].to(dtype).to(device) if addend else None
    weight = torch.rand(rows, top_k)
    return PairSum(y.to(dtype).to(device), choice.to(device), weight.to(device), FIRST, LOCAL, more, joined=addend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addend", [True, False])
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize(("rows", "width", "top_k"), [(1, 64, 8), (7, 40, 3)])
def test_bits(device: str, dtype: torch.dtype, addend: bool, spread: bool, rows: int, width: int, top_k: int) -> None:
    peers, left = alone(device), pairs(device, dtype, rows, width, top_k, addend)
    summed = peers.buffer((rows, width), dtype)
    combine(left.y, left.choice, left.weight, FIRST, LOCAL, left.addend, summed)
    assert torch.equal(summed[0], torch.zeros_like(summed[0]) if left.addend is None else left.addend[0])
    before, weight = torch.randn(rows, width).to(dtype).to(device), torch.randn(width).to(dtype).to(device)
    want, got, out = before.clone(), before.clone(), torch.empty_like(before)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=device) if spread else None
    normed = peers.sum_rows(summed, [rows] if spread else None, offsets, want, weight, EPS)
    peers._pushes.sum_rows(left, offsets, got, weight, out, EPS)
    assert normed is not None and not normed.isnan().any()
    assert torch.equal(got, want) and torch.equal(out, normed)
    peers._pushes.sum_rows(left, offsets, before, None, None, EPS)
    assert torch.equal(before, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 64, 5), (7, 40, 3)])
def test_bits_of_parts(device: str, dtype: torch.dtype, spread: bool, rows: int, width: int, parts: int) -> None:
    torch.manual_seed(rows)
    peers, left = alone(device), PartSum(torch.randn(rows, parts, width).to(device))
    summed = sum(left.y.unbind(1), torch.zeros_like(left.y[:, 0])).to(dtype)
    partial = peers.buffer((rows, width), dtype).copy_(summed)
    before, weight = torch.randn(rows, width).to(dtype).to(device), torch.randn(width).to(dtype).to(device)
    want, got, out = before.clone(), before.clone(), torch.empty_like(before)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=device) if spread else None
    normed = peers.sum_rows(partial, [rows] if spread else None, offsets, want, weight, EPS)
    peers._pushes.sum_rows(left, offsets, got, weight, out, EPS)
    assert normed is not None and torch.equal(got, want) and torch.equal(out, normed)
    assert not torch.equal(got, before)


def test_one_rank_sums_no_pairs(device: str) -> None:
    peers = alone(device)
    assert not peers.takes_unsummed(peers.buffer((3, 64), torch.float32))


@pytest.mark.parametrize(("dtype", "rows", "sums"), [
    (torch.bfloat16, 64, True),
    (torch.bfloat16, 65, False),
    (torch.float32, 32, True),
    (torch.float32, 33, False),
    (torch.float64, 1, False),
    (torch.bfloat16, 0, False),
])  # fmt: skip
def test_which_rows_ranks_sum(device: str, dtype: torch.dtype, rows: int, sums: bool) -> None:
    """Those that are pushed, but in float64, which no kernel sums a token's experts in."""
    memory = torch.zeros(mailbox_bytes(HALF), dtype=torch.uint8, device=device)
    peers = CudaPeers(0, Mapped(memory, [memory.data_ptr()] * 2), HALF)
    assert peers.takes_unsummed(peers.buffer((rows, 2048), dtype)) is sums
