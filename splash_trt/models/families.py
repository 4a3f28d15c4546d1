"""A Hugging Face config.json of an MLA model, turned into ModelConfig.

A field means what it means in transformers 5.24's configuration class of the model type. A field that the class ignores
is followed all the same if vLLM and SGLang follow it and ModelConfig can express it.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from splash_trt.models.config import Experts, GroupScore, LayerKind, ModelConfig, Rope, Scoring, Yarn
from splash_trt.models.family import FAMILIES, Family
from splash_trt.models.fields import Fields
from splash_trt.models.indexer import INDEXER_KEYS, SHARING_KEYS, parse_indexer
from splash_trt.weights.json_file import read_json_object

MAX_CONFIG_BYTES = 10_000_000
MAX_LAYERS = 10_000
LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm in transformers, whatever rms_norm_eps says
DTYPES = ("float64", "float32", "float16", "bfloat16")


READ_KEYS = frozenset(
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim intermediate_size moe_intermediate_size "
    "n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group topk_method scoring_func norm_topk_prob "
    "routed_scaling_factor first_k_dense_replace moe_layer_freq hidden_act mlp_bias rms_norm_eps "
    "attention_bias tie_word_embeddings max_position_embeddings original_max_position_embeddings eos_token_id dtype "
    "torch_dtype rope_theta rope_scaling rope_parameters rope_interleave partial_rotary_factor "
    "quantization_config".split()
)

# Fields without an effect on what is computed at inference. `auto_map` names Python code in the checkpoint, which is
# never run. `head_dim` is not read: checkpoints set it to any of qk_rope_head_dim, qk_nope + qk_rope or v_head_dim, and
# transformers overwrites it (DeepSeek) or takes it for qk_rope_head_dim (GLM). qk_rope_head_dim is used, and the shapes
# of the checkpoint's tensors are checked against it. Layers for multi-token prediction (num_nextn_predict_layers) are
# skipped.
HARMLESS_KEYS = frozenset(
    "_attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout auto_map aux_loss_alpha "
    "bos_token_id chunk_size_feed_forward ep_size head_dim id2label initializer_range is_decoder is_encoder_decoder "
    "label2id num_mtp_layers num_nextn_predict_layers output_attentions output_hidden_states output_router_logits "
    "pad_token_id pretraining_tp problem_type return_dict router_aux_loss_coef seq_aux tokenizer_class "
    "transformers_version use_cache".split()
)

ROPE_KEYS = frozenset("type rope_type rope_theta partial_rotary_factor".split())
YARN_KEYS = ROPE_KEYS | frozenset(
    "factor beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings attention_factor "
    "truncate".split()
)


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a Hugging Face folder. End-of-text ids from its generation_config.json, which
    often has more of them than config.json, are added.

    Raises ValueError naming the file, the field and what is allowed.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}: is not a folder; give the folder that holds the model's config.json")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: holds no config.json; give the model's whole Hugging Face folder")
    model = parse_config(read_json_object(path, max_bytes=MAX_CONFIG_BYTES), where=str(path))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return model
    fields = Fields(read_json_object(generation, max_bytes=MAX_CONFIG_BYTES), where=str(generation))
    more = _eos_token_ids(fields, model.vocab_size)
    return replace(model, eos_token_ids=tuple(dict.fromkeys(model.eos_token_ids + more)))


def parse_config(data: dict[str, Any], *, where: str) -> ModelConfig:
    """ModelConfig from the fields of a config.json; `where` names the file in errors.

    Raises ValueError for a field that is missing, unknown, out of range or contradicts another one.
    """
    fields = Fields(data, where=where)
    family = _family(fields)
    _refuse_unsupported(fields, family)
    vocab_size = fields.size("vocab_size")
    num_heads = fields.size("num_attention_heads")
    if fields.has("num_key_value_heads") and fields.size("num_key_value_heads") != num_heads:
        fields.wrong("num_key_value_heads", f"{num_heads}, the number of attention heads: MLA has no grouped heads")
    nope, rope_dim = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    if rope_dim % 2:
        fields.wrong("qk_rope_head_dim", "even: it is rotated in pairs")
    if fields.has("qk_head_dim") and fields.size("qk_head_dim") != nope + rope_dim:
        fields.wrong("qk_head_dim", f"{nope + rope_dim}, qk_nope_head_dim + qk_rope_head_dim")
    layers = _layers(fields, family)
    indexer = None
    if family.indexer is not None:
        indexer = parse_indexer(fields, family.indexer, len(layers), rope_dim, interleaved=family.indexer_interleaved)
    rope, mscale = _rope(fields, family)
    return ModelConfig(
        model_type=data["model_type"],
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        num_heads=num_heads,
        q_lora_rank=_q_lora_rank(fields, family),
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.size("v_head_dim"),
        intermediate_size=fields.size("intermediate_size"),
        layers=layers,
        experts=_experts(fields, family) if LayerKind.MOE in layers else None,
        rope=rope,
        softmax_scale=(nope + rope_dim) ** -0.5 * mscale * mscale,
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        latent_norm_eps=LATENT_NORM_EPS,
        attention_bias=fields.flag("attention_bias", False),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.size("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(fields, vocab_size),
        dtype=_dtype(fields),
        indexer=indexer,
    )


def _family(fields: Fields) -> Family:
    model_type = fields.data.get("model_type")
    names = ", ".join(FAMILIES)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        fields.wrong("model_type", f"one of {names}")
    return FAMILIES[model_type]


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    if fields.data.get("quantization_config"):
        fields.fail("quantization_config", "is set: quantised checkpoints are not supported yet")
    known = READ_KEYS | HARMLESS_KEYS
    if family.mlp_layer_types:
        known |= {"mlp_layer_types"}
    if family.indexer is not None:
        known |= INDEXER_KEYS
    fields.refuse_unknown(known | SHARING_KEYS if family.indexer_sharing else known)
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.flag("mlp_bias", False):
        fields.wrong("mlp_bias", "false: biases in the MLPs are not supported")


def _q_lora_rank(fields: Fields, family: Family) -> int | None:
    # Whether queries have a latent decides which tensors there are, so a missing field is not taken as null.
    if "q_lora_rank" in fields.data and fields.data["q_lora_rank"] is None:
        if family.indexer is not None:
            fields.wrong("q_lora_rank", "a whole number: the indexer reads the query latent")
        return None
    return fields.size("q_lora_rank")


def _layers(fields: Fields, family: Family) -> tuple[LayerKind, ...]:
    num_layers = fields.size("num_hidden_layers", high=MAX_LAYERS)
    if family.mlp_layer_types and fields.has("mlp_layer_types"):
        return _listed_layers(fields, num_layers)
    first = fields.size("first_k_dense_replace", family.first_dense, low=0)
    every = fields.size("moe_layer_freq", 1)
    if "n_routed_experts" in fields.data and fields.data["n_routed_experts"] is None:
        return (LayerKind.DENSE,) * num_layers
    # DeepSeek's own code: from layer `first` on, the layers whose index is a multiple of `every` have experts.
    moe = [index >= first and index % every == 0 for index in range(num_layers)]
    return tuple(LayerKind.MOE if is_moe else LayerKind.DENSE for is_moe in moe)


def _listed_layers(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    kinds = {"dense": LayerKind.DENSE, "sparse": LayerKind.MOE}
    listed = fields.data["mlp_layer_types"]
    if not isinstance(listed, list) or len(listed) != num_layers:
        fields.wrong("mlp_layer_types", f"a list of {num_layers} words, one a layer (num_hidden_layers)")
    if not all(isinstance(word, str) and word in kinds for word in listed):
        fields.wrong("mlp_layer_types", "a list of 'dense' and 'sparse'")
    return tuple(kinds[word] for word in listed)


def _experts(fields: Fields, family: Family) -> Experts:
    num_experts, inner = fields.size("n_routed_experts"), fields.size("moe_intermediate_size")
    method = fields.choice("topk_method", family.topk_methods, family.topk_methods[0])
    num_groups, top_groups = _groups(fields, family, method, num_experts)
    top_k = fields.size("num_experts_per_tok")
    available = num_experts // num_groups * top_groups
    if top_k > available:
        fields.wrong("num_experts_per_tok", f"at most {available}, the experts that topk_group groups hold")
    shared = family.shared_experts
    if "n_shared_experts" in fields.data:
        shared = fields.size("n_shared_experts", low=0) if fields.has("n_shared_experts") else 0
    normalize = fields.flag("norm_topk_prob", bool(family.normalize))
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_intermediate_size=inner * shared,
        scoring=Scoring(fields.choice("scoring_func", family.scorings, family.scorings[0])),
        selection_bias=method == "noaux_tc",
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=GroupScore.TOP2_SUM if method == "noaux_tc" else GroupScore.MAX,
        normalize=normalize and family.normalize is not None,
        scale=fields.number("routed_scaling_factor", family.scale),
    )


def _groups(fields: Fields, family: Family, method: str, num_experts: int) -> tuple[int, int]:
    """(num_groups, top_groups) as the method uses them: "greedy" chooses among all experts, whatever n_group says."""
    if method == "greedy":
        return 1, 1
    if family.groups is None:
        num_groups, top_groups = fields.size("n_group"), fields.size("topk_group")
    else:
        num_groups = fields.size("n_group", family.groups[0])
        top_groups = fields.size("topk_group", family.groups[1])
    if num_experts % num_groups:
        fields.wrong("n_group", f"a divisor of n_routed_experts, {num_experts}")
    if top_groups > num_groups:
        fields.wrong("topk_group", f"at most n_group, {num_groups}")
    if method == "noaux_tc" and num_groups > 1 and num_experts // num_groups < 2:
        fields.wrong("n_group", f"at most {num_experts // 2}: noaux_tc scores a group by its best two experts")
    return num_groups, top_groups


def _rope(fields: Fields, family: Family) -> tuple[Rope, float]:
    """The rotary embedding, and mscale, by whose square the softmax scale is multiplied."""
    interleaved = fields.flag("rope_interleave", True)
    if not interleaved and not family.rope_choice:
        fields.wrong("rope_interleave", f"true: {fields.data['model_type']} always rotates neighbouring pairs")
    # transformers' precedence: rope_scaling replaces rope_parameters, and a theta inside wins over the flat one.
    chosen = fields.section("rope_scaling") or fields.section("rope_parameters")
    nested = chosen or Fields({}, where=fields.where)
    kind = nested.choice("rope_type", ("default", "yarn"), nested.choice("type", ("default", "yarn"), "default"))
    if nested.has("type") and nested.data["type"] != kind:
        nested.wrong("type", f"the same as rope_type, {kind!r}")
    nested.refuse_unknown(YARN_KEYS if kind == "yarn" else ROPE_KEYS)
    for place in (fields, nested):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            place.wrong("partial_rotary_factor", "1: the rope part of a head is rotated as a whole")
    place = nested if "rope_theta" in nested.data else fields
    theta = place.number("rope_theta", 10000.0, low=1.0)
    if kind == "default":
        return Rope(theta=theta, interleaved=interleaved), 1.0
    yarn, mscale = _yarn(fields, nested)
    return Rope(theta=theta, interleaved=interleaved, yarn=yarn), mscale


def _yarn(fields: Fields, nested: Fields) -> tuple[Yarn, float]:
    """YaRN and its mscale, as transformers' `_compute_yarn_parameters` and `yarn_apply_mscale` have them."""
    if not nested.flag("truncate", True):
        nested.wrong("truncate", "true")
    factor = nested.number("factor", low=1.0, above=False)
    mscale = nested.number("mscale", above=False) if nested.has("mscale") else 0.0
    mscale_all_dim = nested.number("mscale_all_dim", above=False) if nested.has("mscale_all_dim") else 0.0

    def scale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if nested.has("attention_factor"):
        attention_factor = nested.number("attention_factor")
    elif mscale and mscale_all_dim:
        attention_factor = scale_of(mscale) / scale_of(mscale_all_dim)
    else:  # mscale alone is ignored
        attention_factor = scale_of(1.0)
    key = "original_max_position_embeddings"
    place = fields if fields.has(key) else nested
    original = place.size(key) if place.has(key) else fields.size("max_position_embeddings")
    beta_fast = nested.number("beta_fast", 32.0) if nested.has("beta_fast") else 32.0
    beta_slow = nested.number("beta_slow", 1.0) if nested.has("beta_slow") else 1.0
    if beta_slow > beta_fast:
        nested.wrong("beta_slow", f"at most beta_fast, {beta_fast:g}")
    yarn = Yarn(
        factor=factor,
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
    )
    return yarn, scale_of(mscale_all_dim)


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.data.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            fields.wrong("eos_token_id", f"null, a token id from 0 to {vocab_size - 1}, or a list of such ids")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> str:
    """The checkpoint's dtype. transformers wrote it as torch_dtype up to version 4, and as dtype since."""
    older = fields.choice("torch_dtype", DTYPES, "float32")
    dtype = fields.choice("dtype", DTYPES, older)
    if fields.has("torch_dtype") and older != dtype:
        fields.wrong("torch_dtype", f"the same as dtype, {dtype!r}")
    return dtype
