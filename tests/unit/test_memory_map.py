"""How an arena is divided, and the capacities that follow, recomputed here from the tensors' shapes."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import PlacementKind, Residency
from splash_trt.memory.map import Capacity, MemoryMap, capacity, memory_map
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import parse_config
from tests.oracles.checked_scheduler import longest_request

RUNS = settings(deadline=None, derandomize=True)
LAYOUT_OF = {
    PlacementKind.REPLICATED: Layout.TP,
    PlacementKind.OWNED: Layout.DP,
    PlacementKind.STRIPED: Layout.CP,
}
HEADS, HIDDEN, Q, L, R, NOPE, V, LAYERS = 5, 48, 24, 16, 8, 12, 10, 2
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 131,
    "hidden_size": HIDDEN,
    "intermediate_size": 50,
    "moe_intermediate_size": 22,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "n_routed_experts": 7,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": Q,
    "kv_lora_rank": L,
    "qk_rope_head_dim": R,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": V,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return parse_config(CONFIG, where="config.json")


def _config(**changes: Any) -> EngineConfig:
    return EngineConfig(
        **{"num_ranks": 3, "page_tokens": 4, "memory_bytes": 300_000, "context_block_tokens": 64, **changes}
    )


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / 256) * 256


def _heads_bytes(heads: int, itemsize: int) -> int:
    """Of q_b, W_UK, W_UV and o of all layers, each tensor aligned."""
    one = (NOPE + R) * Q, NOPE * L, V * L, V * HIDDEN
    return LAYERS * sum(_aligned(heads * numbers * itemsize) for numbers in one)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_sizes_by_hand(model: ModelConfig, dtype: str) -> None:
    config = _config(dtype=dtype)
    size = config.itemsize
    for rank, heads in enumerate((2, 2, 1)):
        m = memory_map(model, config, rank)
        assert m.page_bytes == LAYERS * 4 * (L + R) * size
        assert m.workspace_bytes == _aligned(64 * (L + R) * size) + _aligned(64 * HEADS * (NOPE + V) * size)
        assert m.others_bytes == _heads_bytes(HEADS - heads, size)
        assert m.own_bytes > _heads_bytes(heads, size)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_parts_lie_in_order_and_do_not_overlap(model: ModelConfig, num_ranks: int) -> None:
    config = _config(num_ranks=num_ranks, memory_bytes=400_001)
    for rank in range(num_ranks):
        m = memory_map(model, config, rank)
        assert m.own_offset == m.workspace_bytes and m.own_offset % 256 == 0
        assert m.pages_offset == m.own_offset + m.own_bytes and m.pages_offset % 256 == 0
        shard, full = m.num_pages(Residency.SHARD), m.num_pages(Residency.FULL)
        assert m.pages_offset + full * m.page_bytes <= m.others_offset
        assert m.pages_offset + shard * m.page_bytes <= m.memory_bytes < m.pages_offset + (shard + 1) * m.page_bytes
        assert m.others_offset % 256 == 0
        assert m.memory_bytes - 256 < m.others_offset + m.others_bytes <= m.memory_bytes
        assert full <= shard


@RUNS
@given(
    st.integers(1, 10**7), st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5), st.integers(1, 10**4)
)
def test_pages_are_as_many_as_fit(memory: int, workspace: int, own: int, others: int, page: int) -> None:
    m = MemoryMap(
        memory_bytes=memory, workspace_bytes=workspace, own_bytes=own, others_bytes=others, page_bytes=page
    )
    rest = memory - workspace - own
    assert m.num_pages(Residency.SHARD) == math.floor(rest / page)
    full = m.num_pages(Residency.FULL)
    assert full * page <= rest - others, "pages lie over the other ranks' heads"
    assert (full + 1) * page > rest - others - 256, "a page more would have fitted"


@RUNS
@given(st.sampled_from(list(PlacementKind)), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 64))
def test_capacities_against_counting_page_by_page(kind: PlacementKind, pages: list[int], page_tokens: int) -> None:
    c = Capacity(pages_per_rank=tuple(pages), page_tokens=page_tokens, placement=kind)
    assert c.request_pages == longest_request(LAYOUT_OF[kind], tuple(pages))
    assert c.request_tokens == c.request_pages * page_tokens
    assert c.total_pages == (min(pages) if kind is PlacementKind.REPLICATED else sum(pages))
    assert c.total_tokens == c.total_pages * page_tokens
    assert c.request_pages <= c.total_pages


def _shortfall(text: str) -> int:
    found = re.search(r"(\d+) more$", text)
    assert found, text
    return int(found[1])


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_the_named_shortfall_is_exactly_what_is_lacking(
    model: ModelConfig, layout: Layout, num_ranks: int, page_tokens: int
) -> None:
    """Adding what the message asks for, rank after rank, ends with at least one page everywhere.

    A page of one token is no multiple of the alignment, which then costs bytes of its own under FULL.
    """
    config = _config(num_ranks=num_ranks, memory_bytes=1000, layout=layout, page_tokens=page_tokens)
    added = 0
    for _ in range(2 * num_ranks + 1):
        try:
            found = capacity(model, config, layout)
            break
        except ValueError as error:
            where = rf"memory_bytes: {config.memory_bytes} .* layout {layout.name.lower()} on rank \d"
            assert re.match(where, str(error))
            added = _shortfall(str(error))
            assert added > 0
            config = dataclasses.replace(config, memory_bytes=config.memory_bytes + added)
    assert min(found.pages_per_rank) == 1
    with pytest.raises(ValueError, match="memory_bytes"):
        capacity(model, dataclasses.replace(config, memory_bytes=config.memory_bytes - 1), layout)


def test_full_residency_costs_the_other_ranks_heads_in_whole_pages(model: ModelConfig) -> None:
    config = _config()
    page = LAYERS * 4 * (L + R) * 4
    dop, dp = (capacity(model, config, layout).pages_per_rank for layout in (Layout.DOP, Layout.DP))
    assert capacity(model, config, Layout.TP).pages_per_rank == dop
    assert capacity(model, config, Layout.CP).pages_per_rank == dp
    for rank, heads in enumerate((2, 2, 1)):
        difference = _heads_bytes(HEADS - heads, 4)
        assert abs((dop[rank] - dp[rank]) * page - difference) < page + 256
