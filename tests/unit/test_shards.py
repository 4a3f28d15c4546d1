"""The cut of every tensor over ranks: nothing lost, nothing twice, blocks that fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.config import EXPERTS_CUTS
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import parse_config
from splash_trt.weights.shards import (
    ALIGNMENT,
    Block,
    align,
    cut_ranges,
    first_expert,
    heads_of,
    others_block,
    own_block,
    own_parts,
)
from splash_trt.weights.spec import Cut, TensorSpec, partition, tensor_specs

RUNS = settings(deadline=None, derandomize=True)
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 256,
    "moe_intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "n_routed_experts": 7,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 128,
}
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return parse_config(CONFIG, where="config.json")


@RUNS
@given(st.integers(0, 2000), st.integers(1, 9), st.sampled_from([1, 7, 128]))
def test_partition_covers_all_once_and_evenly(total: int, parts: int, multiple: int) -> None:
    ranges = partition(total, parts, multiple)
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(total))
    sizes = [end - begin for begin, end in ranges]
    assert all(begin % multiple == 0 or begin == total for begin, _ in ranges)
    assert max(sizes) - min(sizes) <= (1 if multiple == 1 else 2 * multiple - 1)
    assert [-(-size // multiple) for size in sizes] == sorted((-(-s // multiple) for s in sizes), reverse=True)


def test_twenty_heads_on_three_ranks() -> None:
    assert partition(20, 3) == ((0, 7), (7, 14), (14, 20))
    assert partition(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))


@pytest.mark.parametrize(
    ("total", "num_ranks", "sizes"),
    [
        (512, 2, [256, 256]),
        (384, 2, [256, 128]),
        (1536, 5, [384, 384, 256, 256, 256]),
        (256, 3, [86, 85, 85]),  # not enough blocks of 128 for every rank
        (96, 4, [24, 24, 24, 24]),
        (300, 2, [150, 150]),
    ],
)
def test_intermediate_sizes_keep_blocks_of_128_where_there_are_enough(
    total: int, num_ranks: int, sizes: list[int]
) -> None:
    spec = TensorSpec(name="down", shape=(8, total), cut=Cut.INTERMEDIATE, axis=1)
    assert [end - begin for begin, end in cut_ranges(spec, num_ranks)] == sizes


@RANKS
def test_the_ranks_own_parts_are_each_tensor_once(model: ModelConfig, num_ranks: int) -> None:
    blocks = [own_block(model, rank, num_ranks, "float32") for rank in range(num_ranks)]
    for index, spec in enumerate(tensor_specs(model)):
        parts = [block.shards[index].parts for block in blocks]
        assert all(block.shards[index].spec == spec for block in blocks)
        total = spec.shape[spec.axis]
        if spec.cut is Cut.NONE:
            assert parts == [((0, total),)] * num_ranks
        else:
            assert [i for ((b, e),) in parts for i in range(b, e)] == list(range(total))


@RANKS
def test_own_and_others_together_are_all_heads(model: ModelConfig, num_ranks: int) -> None:
    head_cut = {spec.name for spec in tensor_specs(model) if spec.cut is Cut.HEADS}
    assert head_cut == {f"layers.{i}.{name}" for i in range(2) for name in ("q_b", "w_uk", "w_uv", "o")}
    for rank in range(num_ranks):
        own = {s.spec.name: s.parts for s in own_block(model, rank, num_ranks, "float32").shards}
        others = others_block(model, rank, num_ranks, "float32")
        assert {s.spec.name for s in others.shards} == head_cut
        for shard in others.shards:
            ranges = list(shard.parts)
            assert len(ranges) == num_ranks - 1 and ranges == sorted(ranges), "not in rank order"
            assert ranges[:rank] + list(own[shard.spec.name]) + ranges[rank:] == list(cut_ranges(shard.spec, num_ranks))
            assert shard.shape[shard.spec.axis] == sum(end - begin for begin, end in ranges)
    assert sum(heads_of(model, num_ranks)) == 5 and max(heads_of(model, num_ranks)) == -(-5 // num_ranks)


def _check_layout(block: Block, itemsize: int) -> None:
    end = 0
    for shard in block.shards:
        assert shard.offset % ALIGNMENT == 0 and end <= shard.offset < end + ALIGNMENT
        assert shard.itemsize == (max(4, itemsize) if shard.spec.float32 else itemsize)
        end = shard.offset + math.prod(shard.shape) * shard.itemsize
    assert block.num_bytes == align(end)


@RANKS
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_tensors_lie_one_after_another_and_aligned(
    model: ModelConfig, num_ranks: int, dtype: str, itemsize: int
) -> None:
    for rank in range(num_ranks):
        _check_layout(own_block(model, rank, num_ranks, dtype), itemsize)
        _check_layout(others_block(model, rank, num_ranks, dtype), itemsize)


def test_the_selection_bias_stays_wide_in_bfloat16(model: ModelConfig) -> None:
    shards = {s.spec.name: s for s in own_block(model, 0, 1, "bfloat16").shards}
    assert shards["layers.1.router_bias"].itemsize == 4 and shards["layers.1.router"].itemsize == 2


def test_the_first_expert_of_each_rank(model: ModelConfig) -> None:
    assert [first_expert(model, rank, 3) for rank in range(3)] == [0, 3, 5]
    dense = parse_config({**CONFIG, "first_k_dense_replace": 2}, where="config.json")
    assert [first_expert(dense, rank, 3) for rank in range(3)] == [0, 0, 0]


@RANKS
def test_experts_cut_inside_have_every_row_once_and_gate_beside_up(model: ModelConfig, num_ranks: int) -> None:
    """An intermediate size of 22, which divides by few numbers of ranks; all other tensors are cut as ever."""
    blocks = [own_block(model, rank, num_ranks, "float32", experts_cut="inside") for rank in range(num_ranks)]
    whole = own_block(model, 0, num_ranks, "float32")
    for index, spec in enumerate(tensor_specs(model, "inside")):
        shards = [block.shards[index] for block in blocks]
        if ".experts." not in spec.name:
            assert spec == whole.shards[index].spec and shards[0].parts == whole.shards[index].parts
            continue
        ranges = [shard.parts[0] for shard in shards]
        assert [i for begin, end in ranges for i in range(begin, end)] == list(range(22))
        assert min(end - begin for begin, end in ranges) >= 22 // num_ranks > 0
        for shard, (begin, end) in zip(shards, ranges, strict=True):
            if spec.name.endswith("gate_up"):
                assert shard.parts == ((begin, end), (22 + begin, 22 + end))
                assert shard.shape == (7, 2 * (end - begin), 48)
            else:
                assert shard.parts == ((begin, end),) and shard.shape == (7, 48, end - begin)
    assert [first_expert(model, rank, num_ranks, "inside") for rank in range(num_ranks)] == [0] * num_ranks


def test_experts_are_cut_inside_at_multiples_of_128_where_there_are_enough() -> None:
    model = parse_config({**CONFIG, "moe_intermediate_size": 1536}, where="config.json")
    for num_ranks, sizes in ((2, [768, 768]), (5, [384, 384, 256, 256, 256]), (16, [96] * 16)):
        for spec in tensor_specs(model, "inside"):
            if spec.cut is Cut.INSIDE_EXPERTS:
                parts = [own_parts(spec, rank, num_ranks) for rank in range(num_ranks)]
                assert [part[0][1] - part[0][0] for part in parts] == sizes
                assert {part[1][0] - part[0][0] for part in parts if len(part) > 1} <= {1536}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_both_cuts_of_experts_take_the_same_bytes(dtype: str) -> None:
    model = parse_config({**CONFIG, "n_routed_experts": 8, "moe_intermediate_size": 512}, where="config.json")
    for num_ranks in (1, 2, 4):
        for rank in range(num_ranks):
            whole, inside = (own_block(model, rank, num_ranks, dtype, experts_cut=cut) for cut in EXPERTS_CUTS)
            assert whole.num_bytes == inside.num_bytes


def test_one_rank_has_no_others(model: ModelConfig) -> None:
    assert others_block(model, 0, 1, "float32").num_bytes == 0


@pytest.mark.parametrize(("size", "aligned"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_align(size: int, aligned: int) -> None:
    assert align(size) == aligned
