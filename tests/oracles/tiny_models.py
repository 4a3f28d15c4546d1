"""Small random models, one for each combination of options that a checkpoint may use.

`make_model` writes a Hugging Face folder: transformers' own class of the model type decides which tensors the file has,
what they are called and how they are shaped; all values are drawn here, so that every tensor matters (norm weights are
not one, biases and the router's correction bias are not zero).

Not made, because transformers' class of the type has no such option and would silently compute something else:
- deepseek_v2 with `noaux_tc`, a sigmoid or `norm_topk_prob`, or with `rope_interleave` false;
- deepseek_v3 and glm4_moe_lite with softmax scores or another `topk_method` (they always do sigmoid and `noaux_tc`);
- glm4_moe_lite with another `first_k_dense_replace` than 1 and no `mlp_layer_types` (the class ignores the former);
- no shared expert, `moe_layer_freq` other than 1, `num_key_value_heads` other than the number of heads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

CLASSES: Mapping[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}

# rms_norm_eps is large so that the two latent norms, which use 1e-6 whatever it says, can be told from the others.
COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _yarn(mscale: float, mscale_all_dim: float, *, theta: float = 10000.0, factor: float = 16.0) -> dict[str, Any]:
    """yarn whose ramp covers about half of the 8 frequencies of a rope part of 16."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": int(COMMON["max_position_embeddings"] / factor),
    }


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model: its type, what differs from `COMMON`, and how its folder is written.

    rope: transformers' `rope_parameters`.
    flat_rope: write `rope_theta` and `rope_scaling` (with "type") in config.json, as older checkpoints do.
    json_extra: keys put into config.json only; json_drop: keys left out of it.
    num_mtp_layers: prediction layers whose tensors follow the decoder's; a loader must skip them.
    """

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    flat_rope: bool = False
    json_extra: Mapping[str, Any] = field(default_factory=dict)
    json_drop: tuple[str, ...] = ()
    num_mtp_layers: int = 0


V3_JSON: Mapping[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
V2_JSON: Mapping[str, Any] = {"scoring_func": "softmax", "moe_layer_freq": 1}

VARIANTS: dict[str, Variant] = {
    "v3_base": Variant(
        model_type="deepseek_v3",
        options={"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        # What save_pretrained writes for every deepseek_v3: a prediction layer, though the file has none.
        json_extra={**V3_JSON, "num_nextn_predict_layers": 1},
    ),
    "v3_flat_yarn": Variant(
        model_type="deepseek_v3",
        options={
            "vocab_size": 251,
            "num_attention_heads": 8,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
        rope=_yarn(1.0, 0.7),
        flat_rope=True,
        # Contradicts qk_rope_head_dim, which must win.
        json_extra={**V3_JSON, "head_dim": 40},
    ),
    "v3_half_rope": Variant(
        model_type="deepseek_v3",
        options={
            "num_attention_heads": 5,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 2,
            "eos_token_id": [1, 7],
        },
        json_extra=V3_JSON,
    ),
    "v3_mtp": Variant(
        model_type="deepseek_v3",
        options={
            "vocab_size": 257,
            "num_attention_heads": 3,
            "intermediate_size": 50,
            "moe_intermediate_size": 22,
            "n_group": 4,
            "topk_group": 3,
            "first_k_dense_replace": 1,
            "eos_token_id": [1, 250, 256],
        },
        rope={"rope_type": "default", "rope_theta": 50000.0},
        flat_rope=True,
        json_extra=V3_JSON,
        num_mtp_layers=1,
    ),
    "v3_tied": Variant(
        model_type="deepseek_v3",
        options={
            "tie_word_embeddings": True,
            "attention_bias": True,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        rope=_yarn(0.707, 0.707, theta=50000.0),
        json_extra=V3_JSON,
    ),
    "v2_greedy": Variant(
        model_type="deepseek_v2",
        options={
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
        },
        rope={"rope_type": "default", "rope_theta": 50000.0},
        flat_rope=True,
        json_extra={**V2_JSON, "head_dim": 40},
    ),
    "v2_grouped": Variant(
        model_type="deepseek_v2",
        options={
            "num_attention_heads": 8,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "eos_token_id": [1, 2, 3],
        },
        rope=_yarn(0.707, 0.707),
        flat_rope=True,
        json_extra=V2_JSON,
    ),
    "v2_five_heads": Variant(
        model_type="deepseek_v2",
        options={
            "vocab_size": 253,
            "hidden_size": 60,  # deepseek_v2 wants a multiple of the heads
            "num_attention_heads": 5,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 3.0,
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
        },
        rope=_yarn(1.0, 0.5),
        json_extra=V2_JSON,
    ),
    "glm_base": Variant(
        model_type="glm4_moe_lite",
        options={
            "num_attention_heads": 5,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "eos_token_id": [1, 4, 9],
        },
        rope={"rope_type": "default", "rope_theta": 1000000.0},
        json_extra={"topk_method": "noaux_tc"},
    ),
    "glm_flat_mtp": Variant(
        model_type="glm4_moe_lite",
        options={
            "vocab_size": 254,
            "num_attention_heads": 3,
            "q_lora_rank": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
        rope={"rope_type": "default", "rope_theta": 1000000.0},
        flat_rope=True,
        json_extra={"topk_method": "noaux_tc", "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
        json_drop=("mlp_layer_types",),
        num_mtp_layers=1,
    ),
    "glm_mixed": Variant(
        model_type="glm4_moe_lite",
        options={
            "num_attention_heads": 8,
            "rope_interleave": False,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        rope=_yarn(1.0, 1.0, theta=1000000.0),
        # Must lose against mlp_layer_types.
        json_extra={"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    ),
}


def make_model(name: str, folder: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """Write the variant `name` into `folder` (made if missing) and return `folder`.

    The weights are float32 values, which float64 holds exactly. With shards = 1 there is one model.safetensors, else
    `shards` files (tensors dealt round-robin, so that every layer crosses files) and model.safetensors.index.json.
    Raises ValueError for shards < 1 and KeyError for a name not in `VARIANTS`.
    """
    if shards < 1:
        raise ValueError(f"shards is {shards}; it must be at least 1")
    variant = VARIANTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config_class, model_class = CLASSES[variant.model_type]
    options = {**COMMON, **variant.options}
    options.setdefault("num_key_value_heads", options["num_attention_heads"])
    model_class(config_class(**options, rope_parameters=dict(variant.rope))).save_pretrained(folder)

    written = folder / "model.safetensors"
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(written).items()}
    written.unlink()
    shapes.update(_mtp_shapes(shapes, options, variant.num_mtp_layers))
    _write_tensors(folder, _draw(shapes, seed), shards)
    _rewrite_config(folder / "config.json", variant)
    return folder


def _mtp_shapes(
    shapes: Mapping[str, tuple[int, ...]], options: Mapping[str, Any], num_layers: int
) -> dict[str, tuple[int, ...]]:
    """Prediction layers as DeepSeek-V3's files hold them: a decoder layer with its own embedding, norms and head."""
    last, vocab, hidden = options["num_hidden_layers"] - 1, options["vocab_size"], options["hidden_size"]
    found: dict[str, tuple[int, ...]] = {}
    for index in range(last + 1, last + 1 + num_layers):
        source, target = f"model.layers.{last}.", f"model.layers.{index}."
        found.update({target + k[len(source) :]: shape for k, shape in shapes.items() if k.startswith(source)})
        found.update({f"{target}{k}.weight": (hidden,) for k in ("enorm", "hnorm", "shared_head.norm")})
        found.update({f"{target}{k}.weight": (vocab, hidden) for k in ("embed_tokens", "shared_head.head")})
        found[f"{target}eh_proj.weight"] = (hidden, 2 * hidden)
    return found


def _draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Values by name: norm weights around 1, everything else around 0, all wide enough to change a logit."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for key in sorted(shapes):
        noise = torch.randn(shapes[key], generator=generator, dtype=torch.float32)
        tensors[key] = 1 + 0.3 * noise if key.endswith("norm.weight") else 0.2 * noise
    return tensors


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {key: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, key in enumerate(tensors)}
    for file_name in sorted(set(weight_map.values())):
        part = {key: tensors[key] for key, name in weight_map.items() if name == file_name}
        save_file(part, folder / file_name, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _rewrite_config(path: Path, variant: Variant) -> None:
    """Put config.json into the form of the variant: flat or nested rope, extra and missing keys."""
    config = json.loads(path.read_text())
    if variant.flat_rope:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = None if rope["type"] == "default" else rope
    if variant.model_type != "deepseek_v2":
        config["num_nextn_predict_layers"] = variant.num_mtp_layers
    config.update(variant.json_extra)
    for key in variant.json_drop:
        del config[key]
    path.write_text(json.dumps(config, indent=2))
