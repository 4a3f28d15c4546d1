"""Decode attention over paged rows against plain torch, on contexts laid out as the cache lays them out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from splash_plugins.mla_attention import decode_hopper_kernel, decode_reference
from splash_plugins.mla_attention.decode_kernel import DecodeConfig, choose_splits, decode, hopper_config, splits_for

pytestmark = pytest.mark.kernels

SCALE = 0.21
CONFIG = DecodeConfig(block_h=16, block_n=32, num_warps=4, num_stages=1, programs_per_sm=1)


@dataclass
class Case:
    q: torch.Tensor
    pages: torch.Tensor
    tables: torch.Tensor
    slot: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    stride: int
    latent: int

    def run(self, function, num_heads: int, **options) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        out = torch.full((len(self.q), num_heads + 1, self.latent), torch.nan, device=self.q.device)[:, :num_heads]
        lse = torch.full((len(self.q), num_heads + 2), torch.nan, device=self.q.device)[:, :num_heads]
        function(
            self.q,
            self.pages,
            self.tables,
            self.slot,
            self.first,
            self.length,
            self.stride,
            self.latent,
            SCALE,
            out,
            lse,
            **options,
        )
        return out, lse


def make(
    lengths: list[int],
    *,
    heads: int = 3,
    latent: int = 32,
    rope: int = 16,
    page_tokens: int = 64,
    stride: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Queries whose rows lie in pages drawn at random; every number that no query may read is NaN."""
    g = torch.Generator().manual_seed(seed)
    n, width = len(lengths), latent + rope
    used = [-(-length // page_tokens) for length in lengths]
    num_pages = sum(used) + 3
    # One layer of an arena of three: the pages are not contiguous.
    arena = torch.full((num_pages, 3, page_tokens, width), torch.nan)
    pages = arena[:, 1]
    # A rank's own part of a context begins at a column below the stride.
    first = torch.randint(0, stride, (n,), generator=g)
    slot = torch.randperm(n + 2, generator=g)[:n]
    columns = int(max([0, *used])) * stride + stride
    tables = torch.full((n + 2, columns), 1 << 30)
    free = torch.randperm(num_pages, generator=g).tolist()
    for a, length in enumerate(lengths):
        for i in range(used[a]):
            page = free.pop()
            tables[slot[a], first[a] + stride * i] = page
            live = min(page_tokens, length - i * page_tokens)
            pages[page, :live] = torch.randn(live, width, generator=g)
        if length == 0:
            slot[a] = -1
    q = torch.randn(n, heads, width + 5, generator=g)[..., :width]
    index = [t.int().to(device) for t in (tables, slot, first, torch.tensor(lengths, dtype=torch.int32))]
    return Case(q.to(device), arena.to(device)[:, 1], *index, stride, latent)


def check(case: Case, heads: int, **options) -> None:  # type: ignore[no-untyped-def]
    want, want_lse = case.run(decode_reference.decode, heads)
    out, lse = case.run(decode, heads, **options)
    assert want.isfinite().all() and not want_lse.isnan().any()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_ragged_lengths(device: str, stride: int, splits: int) -> None:
    case = make([0, 1, 63, 64, 65, 130, 0], stride=stride, device=device, seed=stride)
    check(case, 3, config=CONFIG, num_splits=splits)


@pytest.mark.parametrize("page_tokens", [4, 24, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_tiles_and_pages(device: str, page_tokens: int, block_n: int) -> None:
    case = make([70, 5, 33], page_tokens=page_tokens, stride=2, device=device)
    check(case, 3, config=DecodeConfig(16, block_n, 4, 2, 1), num_splits=2)


@pytest.mark.parametrize("heads, latent, rope", [(1, 32, 16), (16, 24, 8), (20, 16, 6)])
@pytest.mark.parametrize("splits", [1, 2])
def test_shapes(device: str, heads: int, latent: int, rope: int, splits: int) -> None:
    case = make([40, 3], heads=heads, latent=latent, rope=rope, device=device)
    check(case, heads, config=CONFIG, num_splits=splits)


def test_chosen_config(device: str) -> None:
    check(make([200, 0, 7], device=device), 3)


def test_padding_takes_no_programs_from_the_others(device: str) -> None:
    """Where most queries have no context, those that have one are cut into more parts, with the same result."""
    case = make([130, 64, 0, 0, 0, 0, 0, 0], device=device)
    arguments = (case.q, case.pages, case.tables, case.stride, CONFIG)
    more, fewer = splits_for(*arguments, likely=2), splits_for(*arguments)
    assert more > fewer if device == "cpu" else more >= fewer  # a whole GPU has room for all parts of so short contexts
    for likely in (1, 2, 100, None):
        check(case, 3, likely=likely)


def test_log_sum_exp_is_optional(device: str) -> None:
    case = make([65, 0, 9], device=device)
    want, _ = case.run(decode_reference.decode, 3)
    for splits in (1, 3):
        out = torch.full_like(want, torch.nan)
        arguments = (case.q, case.pages, case.tables, case.slot, case.first, case.length, case.stride, case.latent)
        decode(*arguments, SCALE, out, None, config=CONFIG, num_splits=splits)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_half_precision(device: str) -> None:
    """Products in half precision, sums in float32: as exact as the output's dtype."""
    case = make([130, 64, 0, 7], heads=5, device=device)
    want, want_lse = case.run(decode_reference.decode, 5)
    for splits in (1, 3):
        half = replace(case, q=case.q.half(), pages=case.pages.half())
        out, lse = half.run(decode, 5, config=CONFIG, num_splits=splits)
        torch.testing.assert_close(out, want, rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(lse, want_lse, rtol=5e-3, atol=5e-3)


def test_no_queries(device: str) -> None:
    out, lse = make([], device=device).run(decode, 3)
    assert len(out) == len(lse) == 0


def test_repeats_bit_for_bit(device: str) -> None:
    case = make([150, 64, 90], device=device)
    first, second = (case.run(decode, 3, config=CONFIG, num_splits=4) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("least", [2, 3])
def test_parts_of_several_tiles(device: str, least: int) -> None:
    """Fewer parts than splits, and the last one shorter; contexts of less than a part, and none."""
    case = make([150, 64, 90, 1, 0, 16, 33], device=device)
    check(case, 3, config=replace(CONFIG, least_tiles=least), num_splits=5)


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_splits(1, 1000, CONFIG, 132) == 64
    assert choose_splits(2, 1000, CONFIG, 132) == 32
    assert choose_splits(1, 10, CONFIG, 132) == 10
    assert choose_splits(16, 1000, CONFIG, 132) == 8
    assert choose_splits(512, 1000, CONFIG, 132) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "heads, dtype",
    [(10, torch.bfloat16), (16, torch.float16), (20, torch.bfloat16), (64, torch.bfloat16), (80, torch.float16)],
)
@pytest.mark.parametrize("stride, page_tokens", [(1, 64), (2, 128)])
def test_hopper(device: str, stages: int, heads: int, dtype: torch.dtype, stride: int, page_tokens: int) -> None:
    """By its own kernel, in 16-bit types, with several cuts of the contexts."""
    lengths = [0, 1, 63, 64, 65, 600, 2000, 130]
    case = make(
        lengths, heads=heads, latent=512, rope=64, page_tokens=page_tokens, stride=stride, device=device, seed=heads
    )
    case = replace(case, q=case.q.to(dtype), pages=case.pages.to(dtype))
    assert decode_hopper_kernel.supports(case.q, case.pages, case.latent)
    want, want_lse = replace(case, q=case.q.float(), pages=case.pages.float()).run(decode_reference.decode, heads)
    for splits in (1, 3, 40):
        out, lse = case.run(decode, heads, config=hopper_config(stages, heads, splits), num_splits=splits)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, want_lse, rtol=2e-3, atol=2e-3)


def test_hopper_keeps_to_what_it_can_do(device: str) -> None:
    case = make([40], heads=3, latent=512, rope=32, device=device)
    assert not decode_hopper_kernel.supports(case.q.half(), case.pages.half(), case.latent)
    case = make([40], heads=3, latent=512, rope=64, device=device)
    assert not decode_hopper_kernel.supports(case.q, case.pages, case.latent)
