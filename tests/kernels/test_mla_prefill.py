"""The Triton prefill attention and its gathering of rows against plain torch, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from perf.prefill_sdpa import runs_of
from splash_plugins.mla_attention import prefill_hopper_kernel, prefill_reference
from splash_plugins.mla_attention.gather_kernel import gather_rows
from splash_plugins.mla_attention.prefill_kernel import Blocks, prefill, split_nope
from splash_plugins.mla_attention.tiles import NO_TILE, PREFILL_TILE, tiles_of

pytestmark = pytest.mark.kernels

# Quick to interpret, and quick to compile where float32 products are unrolled.
INTERPRETED = Blocks(block_m=64, block_n=32, warps=4, stages=1)
COMPILED = Blocks(block_m=32, block_n=16, warps=8, stages=1)
SCALE = 0.3


@dataclass
class Case:
    """One round: what prefill takes, but for the results."""

    q: torch.Tensor
    position: torch.Tensor
    rows: torch.Tensor
    k_nope: torch.Tensor
    v: torch.Tensor
    segments: np.ndarray

    def run(self, out: torch.Tensor, lse: torch.Tensor | None, merge: bool, kernel: bool, padding: int = 0) -> None:
        tiles = tiles_of(self.segments)
        tiles = np.concatenate([tiles, np.full((padding, 2), NO_TILE, np.int32)])
        device = self.q.device
        indices = [torch.from_numpy(a.astype(np.int32)).to(device) for a in (self.segments, tiles)]
        arguments = (self.q, self.position, self.rows, self.k_nope, self.v, *indices, SCALE, out, lse, merge)
        if kernel:
            prefill(*arguments, blocks=COMPILED if self.q.is_cuda else INTERPRETED)
        else:
            prefill_reference.prefill(*arguments)


def make_case(
    device: str, segments: list[tuple[int, int, int, int, int]], position: np.ndarray, heads: int, dims: tuple[int, ...]
) -> Case:
    """dims (nope, rope, v); one more row and query than the segments name, with no numbers in them, at the end."""
    nope, rope, vd = dims
    generator = torch.Generator().manual_seed(nope + heads)
    num_rows = max(s[3] for s in segments) + 3
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    fused = draw(num_rows, heads + 1, nope + vd)
    fused[-3:] = torch.nan
    rows = draw(num_rows, 24 + rope)
    rows[-3:] = torch.nan
    return Case(
        q=draw(len(position), heads + 2, nope + rope)[:, 1:-1],
        position=torch.from_numpy(position.astype(np.int32)).to(device),
        rows=rows,
        k_nope=fused[:, 1:, :nope],
        v=fused[:, 1:, nope:],
        segments=np.array(segments, np.int32),
    )


def results(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices of larger tensors, poisoned."""
    queries, heads = case.q.shape[:2]
    out = torch.full((queries, heads + 2, case.v.shape[2]), torch.nan, device=case.q.device)
    lse = torch.full((queries, heads + 2), torch.nan, device=case.q.device)
    return out[:, 1:-1], lse[:, 1:-1]


def check(case: Case, padding: int = 0) -> None:
    out, lse = results(case)
    case.run(out, lse, False, kernel=True, padding=padding)
    want_out, want_lse = results(case)
    case.run(want_out, want_lse, False, kernel=False)
    torch.testing.assert_close(out, want_out, rtol=2e-5, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dims", [(24, 8, 20), (128, 64, 128), (192, 64, 256), (20, 16, 32)])
def test_dims(device: str, dims: tuple[int, int, int]) -> None:
    check(make_case(device, [(0, 70, 0, 90, 0)], np.arange(20, 90), 3, dims))


def test_several_segments_with_padding_between_and_padded_tiles(device: str) -> None:
    segments = [(0, 140, 0, 140, 0), (140, 140, 140, 150, 7), (141, 142, 150, 200, 0), (150, 200, 200, 333, 100)]
    position = np.concatenate([np.arange(140), [0], [49], np.zeros(8), np.arange(183, 233), [5]])
    check(make_case(device, segments, position, 5, (24, 8, 20)), padding=3)


def test_positions_with_gaps(device: str) -> None:
    position = np.arange(300)
    position = position[position // 16 % 3 == 1]  # every third page of a context
    check(make_case(device, [(0, len(position), 0, 300, 0)], position, 2, (24, 8, 20)))


def test_queries_that_see_nothing_give_zero_and_no_weight(device: str) -> None:
    case = make_case(device, [(0, 140, 0, 64, 100)], np.arange(140), 2, (24, 8, 20))
    out, lse = results(case)
    case.run(out, lse, False, kernel=True)
    assert (out[:100] == 0).all() and torch.isneginf(lse[:100]).all()
    assert torch.isfinite(lse[100:]).all()
    check(case)


def test_no_log_sum_exp_wanted(device: str) -> None:
    case = make_case(device, [(0, 30, 0, 40, 0)], np.arange(10, 40), 2, (24, 8, 20))
    out, lse = results(case)
    case.run(out, None, False, kernel=True)
    want, _ = results(case)
    case.run(want, lse, False, kernel=False)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cuts", [(0, 100, 200, 280), (0, 5, 270, 280)])
def test_rounds_merge_into_one(device: str, cuts: tuple[int, ...]) -> None:
    whole = make_case(device, [(0, 150, 0, 280, 0)], np.arange(130, 280), 3, (24, 8, 20))
    out, lse = results(whole)
    for i, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        part = Case(**{**vars(whole), "segments": np.array([(0, 150, begin, end, begin)], np.int32)})
        part.run(out, lse, i > 0, kernel=True)
    want_out, want_lse = results(whole)
    whole.run(want_out, want_lse, False, kernel=False)
    torch.testing.assert_close(out, want_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)


def test_merging_into_nothing_and_with_nothing(device: str) -> None:
    case = make_case(device, [(0, 20, 0, 30, 10)], np.arange(20), 2, (24, 8, 20))
    out, lse = results(case)
    out.zero_()
    lse.fill_(-torch.inf)
    case.run(out, lse, True, kernel=True)
    want_out, want_lse = results(case)
    case.run(want_out, want_lse, False, kernel=False)
    torch.testing.assert_close(out, want_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)
    nothing = Case(**{**vars(case), "segments": np.array([(0, 20, 0, 30, 500)], np.int32)})
    nothing.run(out, lse, True, kernel=True)
    torch.testing.assert_close(out, want_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=2e-5, atol=2e-5)


def test_nothing_to_do(device: str) -> None:
    case = make_case(device, [(0, 0, 0, 4, 0)], np.arange(1), 2, (24, 8, 20))
    out, lse = results(case)
    case.run(out, lse, False, kernel=True)
    assert torch.isnan(out).all() and torch.isnan(lse).all()


def test_tiles_cover_each_query_once_longest_first() -> None:
    segments = np.array([(0, 300, 0, 300, 0), (300, 301, 300, 900, 0), (301, 301, 900, 950, 0)], np.int32)
    tiles = tiles_of(segments)
    assert tiles.dtype == np.int32 and sorted(map(tuple, tiles.tolist())) == [(0, 0), (0, 128), (0, 256), (1, 300)]
    assert tiles[:, 1].tolist() == [300, 256, 128, 0]
    assert tiles_of(np.zeros((0, 5), np.int32)).shape == (0, 2)
    assert PREFILL_TILE == 128


@pytest.mark.parametrize(
    ("nope", "parts"), [(192, (128, 64)), (128, (128, 0)), (24, (32, 0)), (20, (32, 0)), (96, (64, 32)), (7, (16, 0))]
)
def test_nope_is_split_in_powers_of_two(nope: int, parts: tuple[int, int]) -> None:
    assert split_nope(nope) == parts


def test_gathered_rows(device: str) -> None:
    arena = torch.randn(6, 3, 4, 40, device=device)
    pages = arena[:, 1]
    page = torch.tensor([5, -1, 0, 3, 3, -1, 2, 1, 0, 4], dtype=torch.int32, device=device)
    offset = torch.tensor([3, 900, 0, 1, 2, 0, 3, 1, 1, 0], dtype=torch.int32, device=device)
    out = torch.full((10, 48), torch.nan, device=device)
    gather_rows(pages, page, offset, out[:, :40])
    want = pages[page.clamp(min=0).long(), offset.clamp(max=3).long()] * (page >= 0)[:, None]
    assert torch.equal(out[:, :40], want) and torch.isnan(out[:, 40:]).all()
    gather_rows(pages, page[:0], offset[:0], out[:0, :40])


# A request of each length about a block's end, between requests that went wrong.
NEIGHBOURS = [n for length in (1, 63, 64, 65, 127, 128, 129, 200) for n in (length, 5)]


def among_bad_ones(device: str, dims: tuple[int, int, int], bad: float) -> Case:
    """Whole prompts of NEIGHBOURS' lengths, every second one of latents that are `bad`, and so are padding rows, which
    have what an earlier round left."""
    ends = np.cumsum(NEIGHBOURS)
    segments = [(int(e - n), int(e), int(e - n), int(e), 0) for n, e in zip(NEIGHBOURS, ends, strict=True)]
    position = np.concatenate([np.arange(n) for n in NEIGHBOURS])
    case = make_case(device, segments, position, 3, dims)
    for begin, end, *_ in [*segments[1::2], (ends[-1], len(case.rows))]:
        for tensor in (case.rows, case.k_nope, case.v):
            tensor[begin:end] = bad
    return case


def check_good_ones(case: Case, kernel: Callable[..., None], merge: bool, bound: float) -> None:
    """That they get what they get among good ones. kernel: gets what prefill_reference.prefill does."""
    index = [torch.from_numpy(a).to(case.q.device) for a in (case.segments, tiles_of(case.segments))]
    out = torch.zeros((len(case.q), *case.v.shape[1:]), device=case.q.device)
    lse = torch.full(out.shape[:2], -torch.inf, device=case.q.device)
    want_out, want_lse = out.clone(), lse.clone()
    kernel(case.q, case.position, case.rows, case.k_nope, case.v, *index, SCALE, out, lse, merge)
    wide = [x.float().nan_to_num(0, 0, 0) for x in (case.rows, case.k_nope, case.v)]
    prefill_reference.prefill(case.q.float(), case.position, *wide, *index, SCALE, want_out, want_lse, merge)
    for begin, end, *_ in case.segments[::2].tolist():
        torch.testing.assert_close(out[begin:end], want_out[begin:end], rtol=bound, atol=bound)
        torch.testing.assert_close(lse[begin:end], want_lse[begin:end], rtol=bound, atol=bound)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_request_that_went_wrong_spares_its_neighbours(device: str, bad: float, merge: bool) -> None:
    case = among_bad_ones(device, (24, 8, 20), bad)
    blocks = COMPILED if case.q.is_cuda else INTERPRETED
    check_good_ones(case, partial(prefill, blocks=blocks), merge, 2e-5)
    check_good_ones(case, prefill_reference.prefill, merge, 2e-5)


def in_bfloat16(case: Case) -> Case:
    """Keys and values as one up-projection leaves them: side by side, head by head."""
    nope = case.k_nope.shape[2]
    fused = torch.cat([case.k_nope, case.v], dim=-1).bfloat16()
    return Case(
        case.q.bfloat16(), case.position, case.rows.bfloat16(), fused[..., :nope], fused[..., nope:], case.segments
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(192, 64, 256), (128, 64, 128), (64, 64, 64)])
@pytest.mark.parametrize("merge", [False, True])
def test_on_hopper_too(device: str, dims: tuple[int, int, int], merge: bool) -> None:
    """By its own kernel, and by the portable one with tensor descriptors."""
    for bad in (torch.nan, torch.inf):
        case = in_bfloat16(among_bad_ones(device, dims, bad))
        assert prefill_hopper_kernel.supports(case.q, case.rows, case.k_nope, case.v)
        check_good_ones(case, prefill_hopper_kernel.prefill, merge, 2e-2)
        check_good_ones(case, prefill, merge, 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(192, 64, 256), (128, 64, 128)])
@pytest.mark.parametrize("merge", [False, True])
def test_hopper(device: str, dims: tuple[int, int, int], merge: bool) -> None:
    """In bfloat16, with its own kernel; some queries see nothing, and a tile is padding."""
    segments = [(0, 200, 0, 300, 120), (200, 201, 300, 340, 0), (201, 230, 340, 469, 0)]
    position = np.concatenate([np.arange(200), [30], np.arange(100, 129)])
    case = in_bfloat16(make_case(device, segments, position, 6, dims))
    assert prefill_hopper_kernel.supports(case.q, case.rows, case.k_nope, case.v)
    tiles = np.concatenate([tiles_of(case.segments), [[NO_TILE, 0]]])
    index = [torch.from_numpy(a.astype(np.int32)).to(device) for a in (case.segments, tiles)]
    out = torch.randn((len(position), 6, dims[2]), device=device)
    lse = torch.randn((len(position), 6), device=device)
    want_out, want_lse = out.clone(), lse.clone()
    inputs = (case.q, case.position, case.rows, case.k_nope, case.v, *index)
    prefill_hopper_kernel.prefill(*inputs, SCALE, out, lse, merge)
    wide = [t.float() if t.is_floating_point() else t for t in inputs]
    prefill_reference.prefill(*wide, SCALE, want_out, want_lse, merge)
    torch.testing.assert_close(out, want_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=2e-3, atol=2e-3)


def test_pieces_of_runs_are_what_queries_see() -> None:
    """The candidate's cutting, by brute force: a piece's causal mask is aligned with its first key."""
    position = np.array([0, 1, 2, 5, 6, 9, 3, 4, 5, 6])
    segments = np.array([(0, 6, 0, 8, 0), (6, 10, 8, 11, 4), (10, 10, 0, 4, 0)])
    seen = np.zeros((10, 11), np.int64)
    for run in runs_of(segments, position):
        for queries, keys, causal in run.pieces():
            block = np.ones((queries.stop - queries.start, keys.stop - keys.start), np.int64)
            seen[queries, keys] += np.tril(block) if causal else block
    want = np.zeros_like(seen)
    for begin, end, key_begin, key_end, first_key in segments.tolist():
        key_position = first_key + np.arange(key_end - key_begin)
        want[begin:end, key_begin:key_end] = key_position[None] <= position[begin:end, None]
    assert (seen == want).all()
