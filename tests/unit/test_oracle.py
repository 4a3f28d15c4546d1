"""The oracle itself: true float64, the same function as plain transformers, and models in which everything counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.oracles.tiny_models import VARIANTS, make_model
from tests.oracles.transformers_float64 import OnlyFloat64, Oracle, choice_margins, load_model

IDS = [17, 3, 201, 44, 44, 250, 9, 128, 77, 5, 190, 31]
SHARDED = {"v3_mtp": 3, "v2_grouped": 2}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny_models")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.exists() else make_model(name, path, shards=SHARDED.get(name, 1))

    return folder


@pytest.fixture(scope="module")
def oracle_of(folder_of: Callable[[str], Path]) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(folder_of(name))
        return made[name]

    return oracle


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})
    return found


def float32_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] of an unlifted transformers model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_is_clean_float64_and_equals_plain_transformers(
    name: str, folder_of: Callable[[str], Path], oracle_of: Callable[[str], Oracle]
) -> None:
    oracle = oracle_of(name)
    before = oracle.num_guarded_operations
    lifted = oracle.logprobs(IDS)
    assert oracle.num_guarded_operations - before > 300, "the guard saw too little of the forward"
    assert lifted.shape == (len(IDS), oracle.config.vocab_size)
    assert lifted.dtype == torch.float64
    assert torch.allclose(lifted.exp().sum(dim=-1), torch.ones(len(IDS), dtype=torch.float64), atol=1e-12, rtol=0)

    plain = float32_logprobs(load_model(folder_of(name), torch.float32), IDS)
    decided = oracle.router_gaps(IDS) > 1e-4
    assert decided.float().mean() > 0.5, "nearly everything is a router tie: choose other ids"
    error = (lifted - plain).abs().amax(dim=-1)[decided].max()
    assert 0 < error < 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_takes_the_most_likely_token_each_time(name: str, oracle_of: Callable[[str], Oracle]) -> None:
    oracle = oracle_of(name)
    tokens = oracle.greedy(IDS[:4], 4)
    every_position = oracle.logprobs(IDS[:4] + tokens)
    assert tokens == every_position[3:-1].argmax(dim=-1).tolist()
    best, second = every_position.sort(dim=-1, descending=True).values[:, :2].unbind(dim=-1)
    assert torch.equal(oracle.token_gaps(IDS[:4] + tokens), best - second)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_later_token_does_not_change_an_earlier_position(name: str, oracle_of: Callable[[str], Oracle]) -> None:
    whole, part = oracle_of(name).logprobs(IDS), oracle_of(name).logprobs(IDS[:7])
    assert (whole[:7] - part).abs().max() < 1e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_tensor_moves_the_result(name: str, folder_of: Callable[[str], Path]) -> None:
    """A loader that drops or misplaces a kind of tensor cannot pass by chance."""
    model = load_model(folder_of(name), torch.float32)
    kinds: dict[str, list[torch.Tensor]] = {}
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        kind = ".".join(part for part in parts if not part.isdigit())
        kinds.setdefault(kind, []).append(tensor)
    before = float32_logprobs(model, IDS)
    for kind, tensors in kinds.items():
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.copy_(tensor.flip(0))
        moved = (float32_logprobs(model, IDS) - before).abs().max()
        assert moved > 0.05, f"{kind} hardly matters: {moved}"
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


@pytest.mark.parametrize("name", ["v3_base", "v2_greedy", "glm_base"])
def test_the_guard_catches_transformers_float32_islands(name: str, folder_of: Callable[[str], Path]) -> None:
    model = load_model(folder_of(name), torch.float64)
    with torch.no_grad(), pytest.raises(AssertionError, match="float32"), OnlyFloat64():
        model(input_ids=torch.tensor([IDS]), use_cache=False)


def test_the_lift_is_gone_after_use(oracle_of: Callable[[str], Oracle]) -> None:
    oracle_of("v3_base").logprobs(IDS)
    assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
    assert torch.zeros(2, dtype=torch.float64).float().dtype == torch.float32


@pytest.mark.parametrize("name", VARIANTS)
def test_rope_and_softmax_scale_follow_the_papers_formulas(name: str, oracle_of: Callable[[str], Oracle]) -> None:
    """Independent of transformers: numpy float64 from RoFormer's and YaRN's formulas, DeepSeek's use of mscale."""
    rope, config = VARIANTS[name].rope, oracle_of(name).config
    size = config.qk_rope_head_dim
    frequencies = rope["rope_theta"] ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    cos_factor, scale = 1.0, (config.qk_nope_head_dim + size) ** -0.5
    if rope["rope_type"] == "yarn":
        turns = frequencies * rope["original_max_position_embeddings"] / (2 * math.pi)
        # The index at which a frequency makes so many turns over the original context, rounded outwards.
        index = size / 2 * np.log(turns[0] / np.array([32.0, 1.0])) / math.log(rope["rope_theta"])
        low, high = max(math.floor(index[0]), 0), min(math.ceil(index[1]), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
        assert 0 < ramp.mean() < 1, "the model does not exercise both ends of the ramp"
        frequencies = frequencies * (1 - ramp) + frequencies / rope["factor"] * ramp
        all_dim = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        cos_factor = (0.1 * rope["mscale"] * math.log(rope["factor"]) + 1) / all_dim
        scale *= all_dim**2
    inv_freq, attention_scaling, softmax_scale = oracle_of(name).rope()
    np.testing.assert_allclose(inv_freq.numpy(), frequencies, rtol=1e-14)
    assert attention_scaling == pytest.approx(cos_factor, rel=1e-14)
    assert softmax_scale == pytest.approx(scale, rel=1e-14)


def test_choice_margins_of_each_router() -> None:
    scores = torch.tensor([[0.9, 0.2, 0.7, 0.65, 0.1, 0.3]], dtype=torch.float64)
    sigmoid_logits = torch.logit(scores)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0], dtype=torch.float64)

    # Softmax of log p is p: 0.9 and 0.7 are taken, 0.65 is not; all divided by the sum, 2.85.
    greedy = SimpleNamespace(topk_method="greedy", num_group=None, topk_group=None, top_k=2)
    assert choice_margins(greedy, scores.log()).item() == pytest.approx(0.05 / 2.85)

    # Groups of two with best 0.9, 0.7 and 0.3: two stay; of 0.9, 0.7, 0.65, 0.2 three are taken.
    grouped = SimpleNamespace(topk_method="group_limited_greedy", num_group=3, topk_group=2, top_k=3)
    assert choice_margins(grouped, scores.log()).item() == pytest.approx(0.4 / 2.85)

    # With the bias the groups sum to 1.1, 1.35 and 0.9: the group margin 0.2 is above the experts' 0.7 - 0.65.
    biased = SimpleNamespace(e_score_correction_bias=bias, num_group=3, topk_group=2, top_k=2)
    assert choice_margins(biased, sigmoid_logits).item() == pytest.approx(0.05)

    # All that is left is taken: only the groups could change.
    full = SimpleNamespace(e_score_correction_bias=bias, num_group=3, topk_group=2, top_k=4)
    assert choice_margins(full, sigmoid_logits).item() == pytest.approx(0.2)

    ungrouped = SimpleNamespace(e_score_correction_bias=bias, num_group=1, topk_group=1, top_k=6)
    assert choice_margins(ungrouped, sigmoid_logits).item() == math.inf


def test_router_gap_is_the_smallest_so_far(oracle_of: Callable[[str], Oracle]) -> None:
    oracle = oracle_of("v3_base")
    gaps = oracle.router_gaps(IDS)
    assert gaps.shape == (len(IDS),)
    assert bool((gaps[1:] <= gaps[:-1]).all()) and 0 < oracle.router_gap(IDS) == float(gaps[-1])
    assert torch.allclose(oracle.router_gaps(IDS[:5]), gaps[:5], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["v3_mtp", "glm_flat_mtp"])
def test_shards_and_seed(name: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    one, four = make_model(name, tmp_path / "one"), make_model(name, tmp_path / "four", shards=4)
    tensors, dealt = read_tensors(one), read_tensors(four)
    assert tensors.keys() == dealt.keys()
    assert all(torch.equal(tensors[key], dealt[key]) for key in tensors)
    weight_map = json.loads((four / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == tensors.keys() and len(set(weight_map.values())) == 4
    for key, file_name in weight_map.items():
        with safe_open(four / file_name, "pt") as file:
            assert key in file.keys()
    assert torch.equal(Oracle(one).logprobs(IDS), Oracle(four).logprobs(IDS))

    other = read_tensors(make_model(name, tmp_path / "other", seed=1))
    assert not any(torch.equal(tensors[key], other[key]) for key in tensors)
    assert {f"model.layers.3.{k}.weight" for k in ("enorm", "hnorm", "eh_proj", "shared_head.head")} <= tensors.keys()


def test_variants_cover_the_options(folder_of: Callable[[str], Path]) -> None:
    configs = [json.loads((folder_of(name) / "config.json").read_text()) for name in VARIANTS]

    def values(key: str) -> list[Any]:
        return [config.get(key) for config in configs]

    assert set(values("model_type")) == {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
    assert {"noaux_tc", "greedy", "group_limited_greedy"} <= set(values("topk_method"))
    assert {3, 4, 5, 8} == set(values("num_attention_heads"))
    options: dict[str, set[Any]] = {
        "q_lora_rank": {None, 48},
        "rope_interleave": {True, False},
        "attention_bias": {True, False},
        "tie_word_embeddings": {True, False},
        "norm_topk_prob": {True, False},
        "n_shared_experts": {1, 2},
        "first_k_dense_replace": {0, 1, 2},
    }
    for key, wanted in options.items():
        assert wanted <= set(values(key)), key
    assert any("rope_parameters" in config for config in configs)
    assert any("rope_theta" in config and config["rope_scaling"] is None for config in configs)
    assert any((config.get("rope_scaling") or {}).get("type") == "yarn" for config in configs)
    assert any(vocab % 3 and vocab % 4 for vocab in values("vocab_size"))


def test_shards_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards is 0"):
        make_model("v3_base", tmp_path, shards=0)
