"""Kernels that push rows and sum a token's experts or a product's parts on the way, alone: the bits of the sum first,
the rest after it."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.few_rows.parts import PartSum
from splash_plugins.grouped_experts.kernel import combine
from splash_plugins.grouped_experts.pairs import PairSum
from splash_trt.runtime import pushes
from splash_trt.runtime.mailbox import Mapped, mailbox_bytes
from splash_trt.runtime.peers_cuda import CudaPeers

pytestmark = pytest.mark.kernels
HALF, FIRST, LOCAL, EXPERTS, EPS = 1 << 20, 3, 4, 11, 1e-5
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}


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


def plain_sum(left: PairSum) -> torch.Tensor:
    """[T, D] float32, with the kernels' way to sum having no part in it."""
    here = (left.choice >= FIRST) & (left.choice < FIRST + LOCAL)
    weight = torch.where(here, left.weight, 0)
    y = left.y.float().nan_to_num().view(*weight.shape, -1)
    total = (weight[:, :, None] * y).sum(1)
    return total if left.addend is None else total + left.addend.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addend", [True, False])
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize(("rows", "width", "top_k"), [(1, 64, 8), (7, 40, 3)])
def test_bits(device: str, dtype: torch.dtype, addend: bool, spread: bool, rows: int, width: int, top_k: int) -> None:
    peers, left = alone(device), pairs(device, dtype, rows, width, top_k, addend)
    summed = peers.buffer((rows, width), dtype)
    combine(left.y, left.choice, left.weight, FIRST, LOCAL, left.addend, summed)
    torch.testing.assert_close(summed, plain_sum(left).to(dtype), **CLOSE[dtype])
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


@pytest.mark.parametrize("joined", [True, False])
def test_what_follows_a_join_begins_when_all_before_it_is_done(
    device: str, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    asked = []

    def noted(tensor: torch.Tensor, *, after_join: bool = False) -> dict[str, bool]:
        asked.append(after_join)
        return {"OVERLAP": False}

    monkeypatch.setattr(pushes, "overlap", noted)
    peers, left = alone(device), pairs(device, torch.float32, 2, 64, 4, joined)
    hidden = torch.zeros(2, 64, device=device)
    peers._pushes.sum_rows(left, None, hidden, None, None, EPS)
    peers._pushes.sum_rows(PartSum(torch.zeros(2, 3, 64, device=device)), None, hidden, None, None, EPS)
    peers._pushes.sum_rows(torch.zeros_like(hidden), None, hidden, None, None, EPS)
    assert asked == [joined, False, False]


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
