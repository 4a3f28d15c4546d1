"""config.json of the MLA families: what is understood, and as what."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig

from splash_trt.models.config import Experts, GroupScore, Indexer, LayerKind, Scoring
from splash_trt.models.families import load_config
from tests.oracles.published_configs import GLM, GLM_5, V2_LITE, V3, V32, changed, parse
from tests.oracles.tiny_models import CLASSES, VARIANTS, make_model

MODELLING = {
    "deepseek_v2": (modeling_deepseek_v2.DeepseekV2Attention, modeling_deepseek_v2.DeepseekV2RotaryEmbedding),
    "deepseek_v3": (modeling_deepseek_v3.DeepseekV3Attention, modeling_deepseek_v3.DeepseekV3RotaryEmbedding),
    "glm4_moe_lite": (modeling_glm4_moe_lite.Glm4MoeLiteAttention, modeling_glm4_moe_lite.Glm4MoeLiteRotaryEmbedding),
}


def parse_experts(base: dict[str, Any], **changes: Any) -> Experts:
    experts = parse(base, **changes).experts
    assert experts is not None
    return experts


def kinds(base: dict[str, Any], **changes: Any) -> str:
    return "".join(kind.value[0] for kind in parse(base, **changes).layers)


def test_deepseek_v3() -> None:
    model = parse(V3)
    assert (model.model_type, model.vocab_size, model.hidden_size) == ("deepseek_v3", 129280, 7168)
    assert (model.num_heads, model.q_lora_rank, model.kv_lora_rank) == (128, 1536, 512)
    assert (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim) == (128, 64, 128)
    assert (model.row_width, model.qk_head_dim, model.intermediate_size) == (576, 192, 18432)
    assert model.layers == (LayerKind.DENSE,) * 3 + (LayerKind.MOE,) * 58
    assert (model.norm_eps, model.latent_norm_eps, model.max_positions) == (1e-6, 1e-6, 163840)
    assert (model.attention_bias, model.tied_embeddings, model.eos_token_ids) == (False, False, (1,))
    assert model.dtype == "bfloat16"
    moe = model.experts
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.intermediate_size, moe.shared_intermediate_size) == (256, 8, 2048, 2048)
    assert (moe.scoring, moe.selection_bias, moe.group_score) == (Scoring.SIGMOID, True, GroupScore.TOP2_SUM)
    assert (moe.num_groups, moe.top_groups, moe.normalize, moe.scale) == (8, 4, True, 2.5)
    mscale = 0.1 * math.log(40) + 1
    assert model.softmax_scale == pytest.approx(192**-0.5 * mscale**2)
    rope = model.rope
    assert (rope.theta, rope.interleaved) == (10000, True)
    assert rope.yarn is not None
    assert (rope.yarn.factor, rope.yarn.original_max_positions, rope.yarn.attention_factor) == (40, 4096, 1)
    assert (rope.yarn.beta_fast, rope.yarn.beta_slow) == (32, 1)


def test_deepseek_v2_lite() -> None:
    model = parse(V2_LITE)
    assert model.q_lora_rank is None
    assert model.layers == (LayerKind.DENSE,) + (LayerKind.MOE,) * 26
    moe = model.experts
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.shared_intermediate_size) == (64, 6, 2816)
    assert (moe.scoring, moe.selection_bias, moe.num_groups, moe.normalize) == (Scoring.SOFTMAX, False, 1, False)
    assert model.softmax_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)


def test_glm_4_7_flash() -> None:
    model = parse(GLM)
    assert (model.num_heads, model.qk_head_dim, model.v_head_dim, model.softmax_scale) == (20, 256, 256, 0.0625)
    assert model.layers == (LayerKind.DENSE,) + (LayerKind.MOE,) * 46
    assert model.eos_token_ids == (154820, 154827, 154829)
    assert (model.rope.theta, model.rope.yarn, model.norm_eps, model.latent_norm_eps) == (1e6, None, 1e-5, 1e-6)
    moe = model.experts
    assert moe is not None
    assert (moe.top_k, moe.num_groups, moe.scale, moe.scoring) == (4, 1, 1.8, Scoring.SIGMOID)


def test_deepseek_v3_2() -> None:
    """V3 with an indexer, and no other difference."""
    model = parse(V32)
    assert model.indexer == Indexer(num_heads=64, head_dim=128, top_k=2048)
    assert model == dataclasses.replace(parse(V3), model_type="deepseek_v32", indexer=model.indexer)
    assert model.row_width == 576


def test_glm_5() -> None:
    model = parse(GLM_5)
    assert model.indexer == Indexer(num_heads=32, head_dim=128, top_k=2048)
    assert (model.num_heads, model.qk_head_dim, model.v_head_dim, model.softmax_scale) == (64, 256, 256, 0.0625)
    assert model.layers == (LayerKind.DENSE,) * 3 + (LayerKind.MOE,) * 75
    assert (model.rope.theta, model.rope.yarn, model.norm_eps, model.latent_norm_eps) == (1e6, None, 1e-5, 1e-6)
    assert (model.q_lora_rank, model.hidden_size, model.vocab_size) == (2048, 6144, 154880)
    moe = model.experts
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.scale, moe.normalize) == (256, 8, 1, 2.5, True)


DEFAULTED = (
    "index_n_heads index_head_dim index_topk n_group topk_group norm_topk_prob routed_scaling_factor n_shared_experts "
    "first_k_dense_replace rms_norm_eps attention_bias tie_word_embeddings scoring_func topk_method moe_layer_freq"
).split()


@pytest.mark.parametrize(("base", "config_class"), [(V32, DeepseekV32Config), (GLM_5, GlmMoeDsaConfig)])
@pytest.mark.parametrize("index", [{}, {"index_n_heads": 8, "index_head_dim": 96, "index_topk": 77}])
def test_what_is_not_said_is_what_transformers_takes(base: dict[str, Any], config_class: Any, index: Any) -> None:
    said = {key: value for key, value in base.items() if key not in DEFAULTED} | index
    model = parse(said)
    theirs = config_class(**changed(said, {"rope_scaling": None}))
    assert model.indexer is not None and model.experts is not None
    ours = (model.indexer.num_heads, model.indexer.head_dim, model.indexer.top_k)
    assert ours == (theirs.index_n_heads, theirs.index_head_dim, theirs.index_topk)
    assert [{"dense": "dense", "moe": "sparse"}[kind.value] for kind in model.layers] == theirs.mlp_layer_types
    moe = model.experts
    assert (moe.num_groups, moe.top_groups, moe.normalize) == (theirs.n_group, theirs.topk_group, theirs.norm_topk_prob)
    assert moe.scale == theirs.routed_scaling_factor
    assert moe.shared_intermediate_size == theirs.moe_intermediate_size * theirs.n_shared_experts
    assert model.norm_eps == theirs.rms_norm_eps
    assert (model.attention_bias, model.tied_embeddings) == (theirs.attention_bias, theirs.tie_word_embeddings)


@pytest.mark.parametrize(("base", "config_class"), [(V32, DeepseekV32Config), (GLM_5, GlmMoeDsaConfig)])
def test_what_transformers_writes_is_read(base: dict[str, Any], config_class: Any, tmp_path: Path) -> None:
    """With lists of layers' kinds where the published file has numbers."""
    config_class(**changed(base, {"num_hidden_layers": 6})).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["layer_types"] == ["indexed_attention"] * 6
    assert load_config(tmp_path) == parse(base, num_hidden_layers=6)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full"] * 78},
        {"index_topk_pattern": "F" * 78, "index_topk_freq": 4},
        {"index_topk_freq": 1, "index_skip_topk_offset": 3},
        {"index_topk_freq": 4, "index_skip_topk_offset": 78},  # the first that would share lies behind the last
        {"layer_types": ["deepseek_sparse_attention"] * 78},
        {"indexer_rope_interleave": None},
    ],
)
def test_indexers_in_every_layer(changes: dict[str, Any]) -> None:
    assert parse(GLM_5, **changes) == parse(GLM_5)
    theirs = GlmMoeDsaConfig(**changed(GLM_5, changes, drop=("head_dim", "qk_head_dim")))
    assert theirs.indexer_types == ["full"] * 78


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_scales_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The softmax scale and YaRN's factor on cos and sin, as transformers' modules compute them from the same file."""
    folder = make_model(name, tmp_path)
    model = load_config(folder)
    config = CLASSES[model.model_type][0].from_pretrained(folder)
    attention, rotary = MODELLING[model.model_type]
    assert model.softmax_scale == pytest.approx(attention(config, 0).scaling, rel=1e-12)
    expected = rotary(config).attention_scaling
    assert (model.rope.yarn.attention_factor if model.rope.yarn else 1.0) == pytest.approx(expected, rel=1e-12)
    assert model.rope.theta == config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": 0.707}, 0.1 * math.log(40) + 1),  # alone it is ignored
        ({"mscale_all_dim": 0.707}, 0.1 * math.log(40) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 0.1 * math.log(40) + 1),
        ({}, 0.1 * math.log(40) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.25}, 1.25),
    ],
)
def test_yarn_attention_factor(weights: dict[str, float], expected: float) -> None:
    model = parse(V3, rope_scaling={"rope_type": "yarn", "factor": 40, **weights})
    assert model.rope.yarn is not None
    assert model.rope.yarn.attention_factor == pytest.approx(expected)
    assert model.rope.yarn.original_max_positions == 163840
    assert (model.rope.yarn.beta_fast, model.rope.yarn.beta_slow) == (32, 1)
    mscale = 0.1 * weights.get("mscale_all_dim", 0) * math.log(40) + 1
    assert model.softmax_scale == pytest.approx(192**-0.5 * mscale**2)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5.0e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
        # rope_scaling replaces rope_parameters as a whole.
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 7e4}}, 1e4),
        ({"rope_scaling": {"type": "default", "rope_theta": 3e4}, "rope_theta": 5e5}, 3e4),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7e4}}, 7e4),
        ({}, 1e4),
    ],
)
def test_where_theta_is_found(changes: dict[str, Any], theta: float) -> None:
    bare = {key: value for key, value in GLM.items() if key not in ("rope_theta", "rope_scaling")}
    model = parse(bare, **changes)
    assert model.rope.theta == theta
    assert model.rope.yarn is None


def test_layers_with_experts() -> None:
    assert kinds(V3, num_hidden_layers=6, first_k_dense_replace=2, moe_layer_freq=2) == "ddmdmd"
    assert kinds(V3, num_hidden_layers=3, first_k_dense_replace=0) == "mmm"
    assert kinds(V2_LITE, num_hidden_layers=3, n_routed_experts=None) == "ddd"
    assert kinds(GLM, num_hidden_layers=3) == "dmm"
    assert kinds(GLM, num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"]) == "mdm"
    assert kinds(GLM, num_hidden_layers=3, first_k_dense_replace=2) == "ddm"
    dense = parse(V3, num_hidden_layers=3, first_k_dense_replace=3)
    assert dense.experts is None


def test_dense_model_needs_no_expert_fields() -> None:
    expert_keys = ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
    assert parse(V3, expert_keys, first_k_dense_replace=61).experts is None


def test_routing_follows_the_configuration() -> None:
    def routing(base: dict[str, Any], **changes: Any) -> tuple[Any, ...]:
        moe = parse_experts(base, **changes)
        return moe.scoring.value, moe.selection_bias, moe.num_groups, moe.top_groups, moe.group_score.value

    assert routing(V3, scoring_func="softmax") == ("softmax", True, 8, 4, "top2_sum")
    assert routing(V3, topk_method="greedy") == ("sigmoid", False, 1, 1, "max")
    assert routing(V3, topk_method="group_limited_greedy") == ("sigmoid", False, 8, 4, "max")
    assert routing(V3, topk_method=None, scoring_func=None) == ("sigmoid", True, 8, 4, "top2_sum")
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    assert routing(V2_LITE, **grouped) == ("softmax", False, 8, 3, "max")
    # Greedy looks at all experts whatever the groups are.
    assert routing(V2_LITE, n_group=7, topk_group=None) == ("softmax", False, 1, 1, "max")


def test_small_options() -> None:
    assert parse_experts(V3, norm_topk_prob=False).normalize is False
    assert parse_experts(V2_LITE, norm_topk_prob=True).normalize is False  # transformers' class ignores it
    assert parse_experts(V3, n_shared_experts=2).shared_intermediate_size == 4096
    assert parse_experts(V3, n_shared_experts=0).shared_intermediate_size == 0
    assert parse_experts(V3, n_shared_experts=None).shared_intermediate_size == 0
    assert parse(V3, rope_interleave=False).rope.interleaved is False
    assert parse(V3, attention_bias=True).attention_bias is True
    assert parse(V3, tie_word_embeddings=True).tied_embeddings is True
    assert parse(V3, eos_token_id=None).eos_token_ids == ()
    assert parse(V3, eos_token_id=[5, 1, 5]).eos_token_ids == (5, 1)
    assert parse(V3, ("torch_dtype",), dtype="float16").dtype == "float16"
    assert parse(V3, ("torch_dtype",)).dtype == "float32"
    assert parse(V3, num_key_value_heads=None).num_heads == 128
    assert parse(V3, ("num_key_value_heads",)).num_heads == 128
    assert parse(V3, num_nextn_predict_layers=0) == parse(V3)
    assert parse(V3, qk_head_dim=192) == parse(V3)
    assert parse(V3, sliding_window=None, something_off=False, empty=[]) == parse(V3)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 40])
@pytest.mark.parametrize("base", [V3, V2_LITE, GLM], ids=["v3", "v2", "glm"])
def test_head_dim_never_replaces_the_rope_part(base: dict[str, Any], head_dim: int) -> None:
    assert parse(base, head_dim=head_dim) == parse(base)


def test_end_of_text_ids_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3 | {"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert load_config(tmp_path).eos_token_ids == (1, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1 << 40}))
    with pytest.raises(ValueError, match="generation_config.json.*eos_token_id"):
        load_config(tmp_path)
