"""Random weights: one model whatever the number of ranks, and activations that stay sane at any size."""

from __future__ import annotations

import time

import pytest
import torch

from splash_trt.models.config import ModelConfig
from splash_trt.models.families import parse_config
from splash_trt.weights import dummy
from splash_trt.weights.dummy import DummyWeights
from splash_trt.weights.spec import Cut, TensorSpec, partition, tensor_specs

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 50,
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
LARGE = TensorSpec(name="layers.1.experts.gate_up", shape=(4, 1024, 512), cut=Cut.EXPERTS)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> ModelConfig:
    return parse_config(CONFIG, where="config.json")


def inside_experts(model: ModelConfig) -> list[TensorSpec]:
    return [spec for spec in tensor_specs(model, "inside") if spec.cut is Cut.INSIDE_EXPERTS]


def read(
    source: DummyWeights, spec: TensorSpec, begin: int = 0, end: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    end = spec.shape[spec.axis] if end is None else end
    shape = (*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :])
    out = torch.full(shape, torch.nan, dtype=dtype)
    source.read(spec, begin, end, out)
    return out


@pytest.mark.parametrize("chunk", [1 << 16, 100, 7])
def test_parts_of_all_ranks_are_one_model(chunk: int, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cut and however much is made at a time."""
    wholes = {spec.name: read(DummyWeights(model, 5), spec) for spec in tensor_specs(model)}
    monkeypatch.setattr(dummy, "CPU_CHUNK", chunk)
    source = DummyWeights(model, 5)
    for spec in (*tensor_specs(model), *inside_experts(model)):
        for num_ranks in (1, 2, 3, 4):
            ranges = partition(spec.shape[spec.axis], num_ranks)
            parts = [read(source, spec, begin, end) for begin, end in ranges]
            assert torch.equal(torch.cat(parts, dim=spec.axis), wholes[spec.name]), (spec.name, num_ranks)


def test_rows_into_a_part_of_a_tensor(model: ModelConfig) -> None:
    source = DummyWeights(model)
    for spec in (*tensor_specs(model), *inside_experts(model)):
        size = spec.shape[spec.axis]
        whole = torch.zeros(spec.shape)
        source.read(spec, 1, size, whole.narrow(spec.axis, 1, size - 1))
        assert torch.equal(whole.narrow(spec.axis, 1, size - 1), read(source, spec, 1, size))


def test_seed_and_name_decide(model: ModelConfig) -> None:
    first, second = LARGE, TensorSpec(name="layers.2.experts.gate_up", shape=LARGE.shape, cut=Cut.EXPERTS)
    values = read(DummyWeights(model, 1), first)
    assert torch.equal(values, read(DummyWeights(model, 1), first))
    for other in (read(DummyWeights(model, 2), first), read(DummyWeights(model, 1), second)):
        assert abs(torch.corrcoef(torch.stack([values.flatten(), other.flatten()]))[0, 1]) < 0.005


def test_pinned_values(model: ModelConfig) -> None:
    """A change of the recipe changes every published number that was measured with it."""
    spec = TensorSpec(name="embed", shape=(2, 4))
    expected = torch.tensor(
        [
            [0.287747431, 0.470211994, 0.134923982, -0.142376665],
            [-0.393571534, -0.140545407, -0.093650161, 0.354751746],
        ],
        dtype=torch.float64,
    )
    values = read(DummyWeights(model, 0), spec, dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-8)


def test_other_dtypes_are_rounded(model: ModelConfig) -> None:
    source = DummyWeights(model)
    exact = read(source, LARGE, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(read(source, LARGE, dtype=dtype), exact.to(dtype))


def test_normal_and_uncorrelated(model: ModelConfig) -> None:
    x = read(DummyWeights(model, 3), LARGE, dtype=torch.float64) * 512**0.5  # 2 million numbers of variance 1
    assert abs(x.mean()) < 0.004 and abs(x.var() - 1) < 0.006
    assert abs((x**3).mean()) < 0.015 and abs((x**4).mean() - 3) < 0.05
    assert 3.9 < x.abs().max() < 4.33
    flat = x.flatten()
    for lag in (1, 2, 3, 4, 8, 64, 512, 1024, 512 * 1024):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 0.004, lag
    # A matrix of low rank would have far larger singular values than sqrt(rows) + sqrt(columns).
    assert torch.linalg.matrix_norm(x[0], 2) < 1.1 * (1024**0.5 + 512**0.5)


def test_norms_biases_and_scales(model: ModelConfig) -> None:
    source = DummyWeights(model)
    fan_in = {"q_a": 48, "kv_a": 48, "q_b": 24, "w_uk": 16, "w_uv": 16, "o": 50, "router": 48, "gate_up": 48}
    for spec in tensor_specs(model):
        values, last = read(source, spec), spec.name.split(".")[-1]
        if last.endswith("norm"):
            assert (values == 1).all()
        elif last.endswith("bias"):
            assert (values == 0).all()
        elif last in fan_in:
            assert values.std().item() == pytest.approx(fan_in[last] ** -0.5, rel=0.15), spec.name
    seen = {spec.name.split(".")[-1] for spec in tensor_specs(model)}
    assert seen >= {"router_bias", "o_bias", "q_a_bias", *fan_in}


def test_indices_beyond_32_bits(model: ModelConfig) -> None:
    """In a tensor of 2^34 elements, rows that lie 2^32 apart are as random as any and differ."""
    narrow = TensorSpec(name="layers.3.down", shape=(7168, 1 << 22), axis=1, cut=Cut.INTERMEDIATE)
    source = DummyWeights(model)
    out = torch.empty(7168, 4)
    source.read(narrow, (1 << 22) - 4, 1 << 22, out)
    assert out.flatten().unique().numel() > 20_000
    tall = TensorSpec(name="layers.3.experts.gate_up", shape=(1 << 24, 16, 64), cut=Cut.EXPERTS)
    parts = [read(source, tall, begin, begin + 16) for begin in (0, 1 << 22, (1 << 24) - 16)]
    for i in range(3):
        assert parts[i].std().item() == pytest.approx(1 / 8, rel=0.05)
        assert abs((parts[i] * parts[i - 1]).mean()) < 0.001


def test_fast_enough(model: ModelConfig) -> None:
    """A tenth of what one idle core does, so that a crowded machine passes."""
    source, spec = DummyWeights(model), TensorSpec(name="layers.1.experts.down", shape=(8, 1024, 1024))
    out = torch.empty(spec.shape, dtype=torch.bfloat16)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        source.read(spec, 0, 8, out)
        times.append(time.perf_counter() - begin)
    assert out.numel() / min(times) > 10e6
