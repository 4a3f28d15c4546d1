"""Bytes of weights and cache by format, against sums from the published sizes; without formats nothing has changed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from splash_trt.config import DTYPES, EngineConfig, Formats, Layout
from splash_trt.layout.spec import Residency
from splash_trt.memory.map import capacity, default_memory_bytes, memory_map, model_sizes
from splash_trt.weights.formats import PLAIN, bytes_of, format_of, row_bytes
from splash_trt.weights.shards import others_block, own_block
from splash_trt.weights.spec import tensor_specs
from tests.oracles.published_configs import GLM, GLM_5, V2_LITE, V3, V32, parse

FP8 = Formats(weights="fp8", attention="fp8", cache="fp8")

BEFORE = [
    # What there was before formats were: workspace, own, others, page, row, item, default memory, on the last rank.
    (V3, "bfloat16", 8, (68288512, 169560743936, 18357420032, 4497408, 70272, 2, 188523323392)),
    (V3, "float32", 3, (136577024, 893613815808, 28191752192, 8994816, 140544, 4, 933334980608)),
    (V2_LITE, "bfloat16", 3, (9568256, 10340432896, 467140608, 1990656, 31104, 2, 11844754432)),
    (V2_LITE, "float32", 1, (19136512, 62825936896, 0, 3981312, 62208, 4, 63381944320)),
    (GLM, "bfloat16", 3, (19529728, 19793130496, 1250557952, 3465216, 54144, 2, 22469891072)),
    (GLM, "float32", 8, (39059456, 15284812288, 3215720448, 6930432, 108288, 4, 19221166592)),
]


@pytest.mark.parametrize(("base", "dtype", "ranks", "expected"), BEFORE, ids=[f"{b[1]}-{b[2]}" for b in BEFORE])
@pytest.mark.parametrize("explicit", [False, True])
def test_without_formats_every_byte_is_where_it_was(
    base: dict[str, Any], dtype: str, ranks: int, expected: tuple[int, ...], explicit: bool
) -> None:
    """explicit: the engine's dtype, said as a format."""
    formats = Formats(weights=dtype, attention=dtype, cache=dtype) if explicit else Formats()
    config = EngineConfig(num_ranks=ranks, dtype=dtype, memory_bytes=1 << 42, formats=formats)
    model = parse(base)
    m, sizes = memory_map(model, config, ranks - 1), model_sizes(model, config)
    memory = default_memory_bytes(model, config)
    found = (m.workspace_bytes, m.own_bytes, m.others_bytes, m.page_bytes, sizes.row_bytes, sizes.itemsize, memory)
    assert found == expected


@pytest.mark.parametrize(
    ("shape", "stored", "expected"),
    [
        ((7,), "bfloat16", 14),
        ((3, 5), "float32", 60),
        ((3, 5), "float64", 120),
        ((128, 128), "fp8", 16384 + 4),
        ((129, 128), "fp8", 129 * 128 + 2 * 4),
        ((576, 7168), "fp8", 576 * 7168 + 5 * 56 * 4),  # kv_a: a row of blocks that is not full
        ((2, 3, 100, 200), "fp8", 2 * 3 * (20000 + 2 * 4)),
        ((0, 128, 128), "fp8", 0),
    ],
)
def test_bytes_of_a_tensor(shape: tuple[int, ...], stored: str, expected: int) -> None:
    assert bytes_of(shape, stored) == expected


KEPT = ("norm", "bias", "router", "embed", "head", "index_weights")


@pytest.mark.parametrize("base", [V3, V2_LITE, GLM, V32, GLM_5], ids=["v3", "v2", "glm", "v32", "glm5"])
def test_which_tensors_a_format_is_about(base: dict[str, Any]) -> None:
    for spec in tensor_specs(parse(base, attention_bias=True)):
        name = spec.name.rsplit(".", 1)[-1]
        kept = any(word in name for word in KEPT)
        head_cut = name in ("q_b", "w_uk", "w_uv", "o")
        wide = "float32" if name == "router_bias" else "bfloat16"
        assert format_of(spec, "bfloat16", Formats()) == wide
        assert format_of(spec, "bfloat16", FP8) == (wide if kept else "fp8"), spec.name
        only = format_of(spec, "bfloat16", Formats(attention="fp8"))
        assert only == ("fp8" if head_cut else wide), spec.name
        rest = format_of(spec, "bfloat16", Formats(weights="fp8"))
        assert rest == (wide if kept or head_cut else "fp8"), spec.name
        assert format_of(spec, "float64", Formats()) == "float64"


def test_a_row_of_the_cache() -> None:
    plain, sparse = parse(V3), parse(V32)
    for dtype, size in zip(DTYPES, (8, 4, 2), strict=True):
        assert row_bytes(plain, EngineConfig(dtype=dtype)) == 576 * size
        assert row_bytes(sparse, EngineConfig(dtype=dtype)) == (576 + 128) * size
    fp8 = EngineConfig(dtype="bfloat16", formats=Formats(cache="fp8"))
    assert row_bytes(plain, fp8) == 512 + 4 * 4 + 64 * 2 == 656
    assert row_bytes(sparse, fp8) == 656 + 128 + 4
    small = parse(V32, kv_lora_rank=130, index_head_dim=200)
    assert row_bytes(small, fp8) == (130 + 2 * 4) + 64 * 2 + (200 + 2 * 4)
    assert row_bytes(plain, EngineConfig(dtype="float32", formats=Formats(cache="bfloat16"))) == 576 * 2


def test_deepseek_v3_2_by_hand() -> None:
    """From the published sizes alone: 671 B parameters as V3 has, and 14 M for each layer's indexer."""
    hidden, heads, layers, experts = 7168, 128, 61, 256
    head_cut = heads * ((128 + 64) * 1536 + 128 * 512 + 128 * 512 + 128 * hidden)
    latents = hidden * 1536 + 1536 + hidden * (512 + 64) + 512
    indexer = 64 * 128 * 1536 + hidden * 128 + 2 * 128 + hidden * 64
    one_expert = 3 * hidden * 2048
    moe = (experts + 1) * one_expert + experts * hidden + experts
    v3 = layers * (head_cut + latents + 2 * hidden) + 3 * 3 * hidden * 18432 + 58 * moe + 2 * 129280 * hidden + hidden
    assert 671.0e9 < v3 < 671.1e9
    assert 0.85e9 < layers * indexer < 0.86e9
    count = {
        name: sum(math.prod(s.shape) for s in tensor_specs(parse(base))) for name, base in (("v3", V3), ("s", V32))
    }
    assert count == {"v3": v3, "s": v3 + layers * indexer}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


@pytest.mark.parametrize(("attention", "number", "scale"), [("fp8", 1, 4), ("bfloat16", 2, 0)])
def test_a_rank_of_eight_by_hand(attention: str, number: int, scale: int) -> None:
    """DeepSeek-V3.2 with FP8 weights: 16 heads, 32 experts and an eighth of everything else that is cut."""
    config = EngineConfig(
        num_ranks=8,
        dtype="bfloat16",
        formats=Formats(weights="fp8", attention=attention, cache="fp8"),
        memory_bytes=126_900_000_000,
    )
    model = parse(V32)
    m = memory_map(model, config, 3)

    def heads(count: int) -> int:
        blocks = (2 * 12, 1 * 4, 1 * 4, 1 * 56)  # of q_b [192, 1536], W_UK and W_UV [128, 512], o [128, 7168]
        numbers = (192 * 1536, 128 * 512, 128 * 512, 128 * 7168)
        return 61 * sum(_aligned(count * (n * number + b * scale)) for n, b in zip(numbers, blocks, strict=True))

    assert m.others_bytes == heads(112)
    experts = 58 * 32 * (3 * 7168 * 2048 + (32 + 16) * 56 * 4)  # blocks: 32 x 56 gate and up, 56 x 16 down
    dense = 3 * 3 * (7168 * 2304 + 18 * 56 * 4)
    shared = 58 * 3 * (7168 * 256 + 2 * 56 * 4)
    q_a, kv_a = 1536 * 7168 + 12 * 56 * 4, 576 * 7168 + 5 * 56 * 4
    index_q, index_k = 64 * (128 * 1536 + 12 * 4), 128 * 7168 + 56 * 4
    small = 2 * (2 * 7168 + 1536 + 512 + 2 * 128 + 64 * 7168)
    every = 61 * (q_a + kv_a + index_q + index_k + small)
    routers = 58 * (2 * 256 * 7168 + 4 * 256)
    ends = 2 * 2 * 16160 * 7168 + 2 * 7168
    own = heads(16) + experts + dense + shared + every + routers + ends
    assert own <= m.own_bytes <= own + 256 * len(tensor_specs(model))
    assert m.page_bytes == 61 * 64 * 788
    shard = capacity(model, config, Layout.DOP).pages_per_rank[3]
    full = capacity(model, config, Layout.DP).pages_per_rank[3]
    assert shard == m.num_pages(Residency.SHARD) == (126_900_000_000 - m.workspace_bytes - m.own_bytes) // m.page_bytes
    assert abs((shard - full) * m.page_bytes - m.others_bytes) < m.page_bytes + 256
    sizes = model_sizes(model, config)
    assert (sizes.itemsize, sizes.row_bytes, sizes.page_bytes) == (number, 61 * 788, m.page_bytes)
    assert sizes.head_numbers[:4] == (192 * 1536, 128 * 512, 128 * 512, 128 * 7168)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_blocks_keep_scales_and_alignment(ranks: int) -> None:
    model = parse(GLM, num_hidden_layers=3)
    for rank in range(ranks):
        for block in (own_block, others_block):
            found, plain = block(model, rank, ranks, "bfloat16", FP8), block(model, rank, ranks, "bfloat16", PLAIN)
            end = 0
            for shard, before in zip(found.shards, plain.shards, strict=True):
                assert shard.offset % 256 == 0 and end <= shard.offset < end + 256
                end = shard.offset + shard.num_bytes
                assert (shard.spec, shard.parts, shard.shape) == (before.spec, before.parts, before.shape)
                numbers = math.prod(shard.shape)
                if shard.spec.product:
                    assert shard.itemsize == 1 and numbers <= shard.num_bytes <= numbers * 1.01
                else:
                    assert shard.num_bytes == before.num_bytes == numbers * before.itemsize
            assert found.num_bytes == _aligned(end)


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="formats.cache: 'int4' is not one of float64, float32, bfloat16, fp8"):
        Formats(cache="int4")
