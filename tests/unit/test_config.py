"""config.json of the MLA families: what is understood, and the words for what is not."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite

from splash_trt.models.config import Experts, GroupScore, LayerKind, ModelConfig, Scoring
from splash_trt.models.families import MAX_CONFIG_BYTES, load_config, parse_config
from tests.oracles.tiny_models import CLASSES, VARIANTS, make_model

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

V2_LITE: dict[str, Any] = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pad_token_id": 154820,
    "eos_token_id": [154820, 154827, 154829],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

MODELLING = {
    "deepseek_v2": (modeling_deepseek_v2.DeepseekV2Attention, modeling_deepseek_v2.DeepseekV2RotaryEmbedding),
    "deepseek_v3": (modeling_deepseek_v3.DeepseekV3Attention, modeling_deepseek_v3.DeepseekV3RotaryEmbedding),
    "glm4_moe_lite": (modeling_glm4_moe_lite.Glm4MoeLiteAttention, modeling_glm4_moe_lite.Glm4MoeLiteRotaryEmbedding),
}


def changed(base: dict[str, Any], changes: dict[str, Any], drop: tuple[str, ...] = ()) -> dict[str, Any]:
    data = copy.deepcopy(base)
    data.update(changes)
    for key in drop:
        del data[key]
    return data


def parse(base: dict[str, Any], drop: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    return parse_config(changed(base, changes, drop), where="config.json")


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


YARN = V3["rope_scaling"]

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (V3, {"model_type": "llama"}, "model_type"),
    (V3, {"model_type": None}, "model_type"),
    (V3, {"model_type": ["deepseek_v3"]}, "model_type"),
    (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (V3, {"index_topk": 2048}, "index_topk"),
    (V3, {"mlp_layer_types": ["dense"] * 61}, "mlp_layer_types"),
    (V3, {"hidden_act": "gelu"}, "hidden_act"),
    (V3, {"mlp_bias": True}, "mlp_bias"),
    (V3, {"attention_bias": "no"}, "attention_bias"),
    (V3, {"attention_bias": 1}, "attention_bias"),
    (V3, {"num_key_value_heads": 8}, "num_key_value_heads"),
    (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    (V3, {"qk_head_dim": 128}, "qk_head_dim"),
    (V3, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (V3, {"hidden_size": 7168.0}, "hidden_size"),
    (V3, {"hidden_size": True}, "hidden_size"),
    (V3, {"hidden_size": 2**40}, "hidden_size"),
    (V3, {"vocab_size": "129280"}, "vocab_size"),
    (V3, {"q_lora_rank": 0}, "q_lora_rank"),
    (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    (V3, {"first_k_dense_replace": None}, "first_k_dense_replace"),
    (V3, {"moe_layer_freq": 0}, "moe_layer_freq"),
    (V3, {"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
    (V3, {"n_shared_experts": -1}, "n_shared_experts"),
    (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok"),  # four of eight groups hold 128
    (V3, {"num_experts_per_tok": None}, "num_experts_per_tok"),
    (V3, {"n_group": 7}, "n_group"),
    (V3, {"n_group": None}, "n_group"),
    (V3, {"n_group": 256, "topk_group": 8}, "n_group"),  # groups of one expert have no best two
    (V3, {"topk_group": 9}, "topk_group"),
    (V3, {"topk_group": 0}, "topk_group"),
    (V3, {"topk_method": "best"}, "topk_method"),
    (V3, {"scoring_func": "tanh"}, "scoring_func"),
    (V3, {"norm_topk_prob": None}, "norm_topk_prob"),
    (V3, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    (V3, {"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
    (V3, {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    (V3, {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    (V3, {"rope_theta": 1}, "rope_theta"),
    (V3, {"rope_theta": float("nan")}, "rope_theta"),
    (V3, {"rope_theta": 10**400}, "rope_theta"),
    (V3, {"rope_interleave": None}, "rope_interleave"),
    (V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (V3, {"rope_scaling": "yarn"}, "rope_scaling"),
    (V3, {"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type"),
    (V3, {"rope_scaling": {**YARN, "rope_type": "llama3"}}, "rope_scaling.rope_type"),
    (V3, {"rope_scaling": {**YARN, "rope_type": "default"}}, "rope_scaling.type"),
    (V3, {"rope_scaling": {"rope_type": "default", "factor": 4}}, "rope_scaling.factor"),
    (V3, {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    (V3, {"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor"),
    (V3, {"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate"),
    (V3, {"rope_scaling": {**YARN, "short_factor": [1]}}, "rope_scaling.short_factor"),
    (V3, {"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_scaling.beta_slow"),
    (V3, {"rope_scaling": {**YARN, "mscale": "1"}}, "rope_scaling.mscale"),
    (V3, {"rope_scaling": {**YARN, "attention_factor": 0}}, "rope_scaling.attention_factor"),
    (V3, {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
    (V3, {"rope_scaling": None, "rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type"),
    (V3, {"eos_token_id": 129280}, "eos_token_id"),
    (V3, {"eos_token_id": [1, -1]}, "eos_token_id"),
    (V3, {"eos_token_id": True}, "eos_token_id"),
    (V3, {"eos_token_id": "</s>"}, "eos_token_id"),
    (V3, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
    (V3, {"dtype": "float32"}, "torch_dtype"),
    (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func"),
    (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method"),
    (V2_LITE, {"rope_interleave": False}, "rope_interleave"),
    (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group"),
    (GLM, {"mlp_layer_types": ["dense"] * 46}, "mlp_layer_types"),
    (GLM, {"mlp_layer_types": ["dense"] * 46 + ["moe"]}, "mlp_layer_types"),
    (GLM, {"mlp_layer_types": "dense"}, "mlp_layer_types"),
]


@pytest.mark.parametrize(("base", "changes", "field"), WRONG, ids=[f"{i}-{w[2]}" for i, w in enumerate(WRONG)])
def test_wrong_field_is_named(base: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: .*{field} ") as caught:
        parse(base, **changes)
    assert len(str(caught.value)) < 400


REQUIRED = (
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts "
    "num_experts_per_tok max_position_embeddings"
)
SIZES = REQUIRED.split()[1:] + ["n_group", "topk_group"]


@pytest.mark.parametrize("field", REQUIRED.split())
def test_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {field} "):
        parse(V3, (field,))


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", [8]])
@pytest.mark.parametrize("field", SIZES)
def test_size_must_be_a_positive_whole_number(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"config.json: {field} is .*whole number"):
        parse(V3, **{field: value})


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_not_supported_yet(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"model_type is '{model_type}', which is not supported yet"):
        parse(V3, model_type=model_type, index_topk=2048)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must hold a JSON object"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": \xff}', "not UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' occurs twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply|not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than"),
    ],
    ids=["list", "empty", "open", "encoding", "twice", "twice-inside", "nan", "deep", "large"],
)
def test_file_that_is_no_configuration(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json: cannot be read"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match="absent: is not a folder"):
        load_config(tmp_path / "absent")


def test_load_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert load_config(tmp_path) == parse(V3)
    (tmp_path / "config.json").write_text(json.dumps({**V3, "n_group": 7}))
    with pytest.raises(ValueError, match="config.json: n_group is 7; it must be a divisor of n_routed_experts, 256"):
        load_config(tmp_path)
