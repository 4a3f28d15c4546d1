"""Decode attention over paged rows against plain torch, on contexts laid out as the cache lays them out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from splash_plugins.mla_attention import decode_hopper_kernel, decode_kernel, decode_reference
from splash_plugins.mla_attention.cut import Parts, cut, parts_of
from splash_plugins.mla_attention.decode_kernel import DecodeConfig, decode, hopper_config
from splash_plugins.mla_attention.decode_merge_kernel import PROGRAMS

pytestmark = pytest.mark.kernels

SCALE = 0.21
CONFIG = DecodeConfig(block_h=16, block_n=32, num_warps=4, num_stages=1)
UNCUT = 1000


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

    def parts(self, size: int | None = None) -> Parts:
        """Of `size` tiles at most; None: as they are cut by themselves."""
        length = self.length.cpu().numpy()
        found = cut(length, self.q.shape[1]) if size is None else parts_of(length, size)
        return Parts(*(torch.from_numpy(array).to(self.q.device) for array in found))

    def run(self, function, num_heads: int, size: int | None = None, **options) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        out = torch.full((len(self.q), num_heads + 1, self.latent), torch.nan, device=self.q.device)[:, :num_heads]
        lse = torch.full((len(self.q), num_heads + 2), torch.nan, device=self.q.device)[:, :num_heads]
        function(
            self.q,
            self.pages,
            self.tables,
            self.slot,
            self.first,
            self.length,
            self.parts(size),
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


@pytest.mark.parametrize("size", [UNCUT, 2, 1])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_ragged_lengths(device: str, stride: int, size: int) -> None:
    case = make([0, 1, 63, 64, 65, 200, 0, 129], stride=stride, device=device, seed=stride)
    check(case, 3, config=CONFIG, size=size)


def test_one_long_context(device: str) -> None:
    """Merged in several rounds, among others that are not."""
    case = make([100, 17 * 64 + 5, 64, 0], device=device)
    check(case, 3, config=CONFIG, size=1)


def test_more_contexts_to_merge_than_programs(device: str) -> None:
    heads = 64
    lengths = [65 + a % 3 for a in range(PROGRAMS // heads + 2)]
    case = make(lengths, heads=heads, latent=16, rope=16, device=device)
    check(case, heads, config=CONFIG, size=1)
    assert int((case.parts(1).merged >= 0).sum()) == len(lengths) > PROGRAMS // heads


@pytest.mark.parametrize("lengths", [[130] * 64, [40] * 130 + [0, 3]])
def test_all_room_for_parts_and_none_beyond(monkeypatch: pytest.MonkeyPatch, device: str, lengths: list[int]) -> None:
    """As many parts as there may be, all of them to merge or none; nothing is written next to their room."""
    behind: list[torch.Tensor] = []

    def guarded(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        whole = torch.full((shape[0] + 300, *shape[1:]), torch.nan, **options)
        behind.append(whole[shape[0] :])
        return whole[: shape[0]]

    case = make(lengths, heads=1, latent=16, rope=16, device=device)
    want, want_lse = case.run(decode_reference.decode, 1)
    monkeypatch.setattr(decode_kernel.torch, "empty", guarded)
    out, lse = case.run(decode_kernel.decode, 1, 1, config=CONFIG)
    monkeypatch.undo()
    assert len(behind) == 2 and all(x.isnan().all() for x in behind)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_wide_latents_are_merged_in_blocks(device: str) -> None:
    check(make([130, 3], heads=1, latent=520, rope=16, device=device), 1, config=CONFIG, size=1)


@pytest.mark.parametrize("page_tokens", [4, 24, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_tiles_and_pages(device: str, page_tokens: int, block_n: int) -> None:
    case = make([70, 5, 33], page_tokens=page_tokens, stride=2, device=device)
    check(case, 3, config=DecodeConfig(16, block_n, 4, 2), size=1)


@pytest.mark.parametrize("heads, latent, rope", [(1, 32, 16), (16, 24, 8), (20, 16, 6)])
@pytest.mark.parametrize("size", [UNCUT, 1])
def test_shapes(device: str, heads: int, latent: int, rope: int, size: int) -> None:
    case = make([70, 3], heads=heads, latent=latent, rope=rope, device=device)
    check(case, heads, config=CONFIG, size=size)


def test_chosen_config(device: str) -> None:
    check(make([200, 0, 7], device=device), 3)


def test_no_query_has_a_context(device: str) -> None:
    check(make([0, 0], device=device), 3)


def test_log_sum_exp_is_optional(device: str) -> None:
    case = make([65, 0, 9], device=device)
    want, _ = case.run(decode_reference.decode, 3)
    for size in (UNCUT, 1):
        out = torch.full_like(want, torch.nan)
        index = (case.pages, case.tables, case.slot, case.first, case.length, case.parts(size))
        decode(case.q, *index, case.stride, case.latent, SCALE, out, None, config=CONFIG)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_half_precision(device: str) -> None:
    """Products in half precision, sums in float32: as exact as the output's dtype."""
    case = make([130, 64, 0, 7], heads=5, device=device)
    want, want_lse = case.run(decode_reference.decode, 5)
    for size in (UNCUT, 1):
        half = replace(case, q=case.q.half(), pages=case.pages.half())
        out, lse = half.run(decode, 5, size, config=CONFIG)
        torch.testing.assert_close(out, want, rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(lse, want_lse, rtol=5e-3, atol=5e-3)


def test_no_queries(device: str) -> None:
    out, lse = make([], device=device).run(decode, 3)
    assert len(out) == len(lse) == 0


def test_ranks_without_heads(device: str) -> None:
    case = make([70, 3], device=device)
    check(replace(case, q=case.q[:, :0]), 0)


def test_repeats_bit_for_bit(device: str) -> None:
    case = make([150, 64, 90], device=device)
    first, second = (case.run(decode, 3, 1, config=CONFIG) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


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
    for size in (UNCUT, 3, 1, None):
        out, lse = case.run(decode, heads, size, config=hopper_config(stages, heads))
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, want_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("heads", [10, 128])
@pytest.mark.parametrize("lengths", [[150] * 40 + [9000], [0, 5000, 70] + [64] * 200])
def test_uneven_on_hopper(device: str, stages: int, heads: int, lengths: list[int]) -> None:
    """One context is cut and merged, the others are written where they belong; as the host cuts them."""
    case = make(lengths, heads=heads, latent=512, rope=64, device=device, seed=heads)
    case = replace(case, q=case.q.bfloat16(), pages=case.pages.bfloat16())
    want, want_lse = replace(case, q=case.q.float(), pages=case.pages.float()).run(decode_reference.decode, heads)
    count = case.parts().read_part[:, 1].tolist()
    assert count[lengths.index(max(lengths))] > 1 and 1 in count
    out, lse = case.run(decode, heads, config=hopper_config(stages, heads))
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=2e-3, atol=2e-3)


def test_hopper_keeps_to_what_it_can_do(device: str) -> None:
    case = make([40], heads=3, latent=512, rope=32, device=device)
    assert not decode_hopper_kernel.supports(case.q.half(), case.pages.half(), case.latent)
    case = make([40], heads=3, latent=512, rope=64, device=device)
    assert not decode_hopper_kernel.supports(case.q, case.pages, case.latent)
