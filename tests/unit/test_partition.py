"""Which rank computes which token, in each layout, against the layouts' table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.layout.partition import rank_counts, token_ranks
from splash_trt.layout.spec import SPECS, PlacementKind, Residency, Tokens

RUNS = settings(deadline=None, derandomize=True)
ROW = st.tuples(st.integers(0, 200), st.integers(1, 40), st.booleans())  # start, count, absorbed


def test_the_four_layouts() -> None:
    table = {layout: (spec.tokens, spec.residency, spec.placement) for layout, spec in SPECS.items()}
    assert table == {
        Layout.TP: (Tokens.EVERYWHERE, Residency.SHARD, PlacementKind.REPLICATED),
        Layout.DP: (Tokens.SPREAD, Residency.FULL, PlacementKind.OWNED),
        Layout.CP: (Tokens.SPREAD, Residency.FULL, PlacementKind.STRIPED),
        Layout.DOP: (Tokens.EVERYWHERE, Residency.SHARD, PlacementKind.OWNED),
    }


@RUNS
@given(
    st.sampled_from(list(Layout)),
    st.integers(1, 5),
    st.sampled_from([1, 3, 16]),
    st.lists(ROW, max_size=6),
    st.data(),
)
def test_every_token_is_where_the_table_says(
    layout: Layout, num_ranks: int, page_tokens: int, rows: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    home = [data.draw(st.integers(0, num_ranks - 1)) for _ in rows]
    start, count = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    absorbed = np.array([row[2] for row in rows], np.bool_)
    ranks = token_ranks(
        layout,
        np.array(home, np.int32),
        start,
        count,
        absorbed,
        num_ranks=num_ranks,
        page_tokens=page_tokens,
    )
    num_tokens = int(count.sum())
    counts = rank_counts(ranks, num_tokens, num_ranks)
    assert counts.dtype == np.int32
    if layout in (Layout.TP, Layout.DOP):
        assert ranks is None and counts.tolist() == [num_tokens] * num_ranks
        return
    expected = [
        owner if layout is Layout.DP or decode else (owner + position // page_tokens) % num_ranks
        for owner, (begin, length, decode) in zip(home, rows, strict=True)
        for position in range(begin, begin + length)
    ]
    assert ranks is not None and ranks.dtype == np.int32
    assert ranks.tolist() == expected
    assert counts.tolist() == [expected.count(rank) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000, 4096])
def test_a_prompt_is_balanced_under_context_parallelism(num_ranks: int, num_tokens: int) -> None:
    """No rank has more than one page of tokens more than another, and its share of the causal triangle."""
    one = np.ones(1, np.int32)
    ranks = token_ranks(
        Layout.CP, 0 * one, 0 * one, num_tokens * one, one < 0, num_ranks=num_ranks, page_tokens=64
    )
    assert ranks is not None
    counts = rank_counts(ranks, num_tokens, num_ranks)
    assert counts.sum() == num_tokens and counts.max() - counts.min() <= 64
    work = np.bincount(ranks, weights=np.arange(1, num_tokens + 1), minlength=num_ranks)
    if num_tokens >= 1000:
        assert work.max() - work.min() <= 64 * num_tokens


def test_no_rows_at_all() -> None:
    none = np.zeros(0, np.int32)
    for layout in Layout:
        ranks = token_ranks(layout, none, none, none, none > 0, num_ranks=3, page_tokens=4)
        assert rank_counts(ranks, 0, 3).tolist() == [0, 0, 0]
