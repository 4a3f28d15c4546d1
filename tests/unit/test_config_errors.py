"""config.json files that are refused, each with the name of the field or file that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splash_trt.models.families import MAX_CONFIG_BYTES, load_config
from tests.oracles.published_configs import GLM, GLM_5, V2_LITE, V3, V32, parse

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
    (GLM, {"index_topk": 2048}, "index_topk"),
    (V32, {"index_n_heads": 0}, "index_n_heads"),
    (V32, {"index_n_heads": None}, "index_n_heads"),
    (V32, {"index_head_dim": "128"}, "index_head_dim"),
    (V32, {"index_head_dim": 32}, "index_head_dim"),  # the rope part is 64 of it
    (V32, {"index_topk": 2048.0}, "index_topk"),
    (V32, {"q_lora_rank": None}, "q_lora_rank"),
    (V32, {"rope_interleave": False}, "rope_interleave"),
    (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
    (V32, {"layer_types": ["full_attention"] * 61}, "layer_types"),
    (V32, {"layer_types": ["indexed_attention"] * 60}, "layer_types"),
    (V32, {"layer_types": [["indexed_attention"]] * 61}, "layer_types"),
    (V32, {"layer_types": "indexed_attention"}, "layer_types"),
    (V32, {"indexer_types": ["full"] * 61}, "indexer_types"),  # a field of glm_moe_dsa alone
    (GLM_5, {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    (GLM_5, {"indexer_types": ["full"] * 77 + ["shared"]}, "indexer_types"),
    (GLM_5, {"indexer_types": ["full"] * 77}, "indexer_types"),
    (GLM_5, {"indexer_types": ["whole"] * 78}, "indexer_types"),
    (GLM_5, {"indexer_types": 1}, "indexer_types"),
    (GLM_5, {"index_topk_pattern": "F" * 77 + "S"}, "index_topk_pattern"),
    (GLM_5, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, "index_topk_freq"),
    (GLM_5, {"index_topk_freq": "4"}, "index_topk_freq"),
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
    with pytest.raises(ValueError, match="holds no config.json; give"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match="absent: is not a folder"):
        load_config(tmp_path / "absent")


def test_load_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert load_config(tmp_path) == parse(V3)
    (tmp_path / "config.json").write_text(json.dumps({**V3, "n_group": 7}))
    with pytest.raises(ValueError, match="config.json: n_group is 7; it must be a divisor of n_routed_experts, 256"):
        load_config(tmp_path)
