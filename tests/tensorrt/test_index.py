"""The indexer's part of attention_in chooses the rows that transformers' own indexers choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from splash_engines import ops
from splash_engines.tensorrt.segments import Lowering
from splash_engines.tensorrt.sizes import sizes_of
from splash_trt.config import Layout
from splash_trt.models.families import parse_config
from splash_trt.weights.spec import tensor_specs
from tests.oracles.network_evaluator import NetworkEvaluator
from tests.tensorrt.evaluated import api
from tests.tensorrt.segments_harness import AnyWeights

INDEXERS: dict[str, tuple[Any, Any]] = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32Indexer),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaIndexer),
}
TOKENS, TOP = 20, 5
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24, "v_head_dim": 20, "index_n_heads": 6, "index_head_dim": 40, "index_topk": TOP,
}  # fmt: skip


@pytest.mark.parametrize("model_type", list(INDEXERS))
@pytest.mark.parametrize("mistake", [None, "rope", "scale", "norm"])
def test_choices(model_type: str, mistake: str | None) -> None:
    """With planted mistakes it does not."""
    config_class, indexer_class = INDEXERS[model_type]
    config = config_class(**SIZES)
    model = parse_config(config.to_dict() | {"model_type": model_type}, where=model_type)
    assert model.indexer is not None
    weights = {}
    for spec in tensor_specs(model):
        weights[spec.name] = torch.empty(spec.shape)
        AnyWeights(model, 4).read(spec, 0, spec.shape[spec.axis], weights[spec.name])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((TOKENS, model.hidden_size), generator=generator)
    cos, sin = ops.rope_tables(torch.arange(TOKENS), ops.rope_frequencies(model.rope, 16), 1.0, torch.float32)
    lowering = Lowering(api=api(), builder=api().create_builder(), model=model, dtype="float32")
    graph = lowering("attention_in", sizes_of(model, Layout.DP, 0, 1, 64))
    assert graph is not None
    network = NetworkEvaluator(api().trt, graph.network)
    bound = {name: weights.get(f"layers.0.{name[4:]}") for name in network.inputs if name.startswith("own.")}
    found = network({"hidden": hidden, "cos": cos, "sin": sin, **bound})
    q, key, weight = found["index_q"], found["index_key"], found["index_weight"]
    if mistake == "rope":
        half = key[:, :16].reshape(TOKENS, 2, 8).transpose(1, 2).reshape(TOKENS, 16)
        key = torch.cat([half, key[:, 16:]], dim=1)
    elif mistake == "scale":
        weight = weight.abs()
    elif mistake == "norm":
        key = key - weights["layers.0.index_k_norm_bias"]
    scores = torch.einsum("th,ths->ts", weight, torch.relu(torch.einsum("thd,sd->ths", q, key)))
    seen = torch.ones(TOKENS, TOKENS).tril().bool()
    got = scores.masked_fill(~seen, -torch.inf).topk(TOP, dim=-1).indices[TOP - 1 :].sort(dim=-1).values

    indexer = indexer_class(config, 0)
    p = "layers.0."
    with torch.no_grad():
        indexer.wq_b.weight.copy_(weights[p + "index_q"].flatten(0, 1))
        indexer.wk.weight.copy_(weights[p + "index_k"])
        indexer.k_norm.weight.copy_(weights[p + "index_k_norm"])
        indexer.k_norm.bias.copy_(weights[p + "index_k_norm_bias"])
        indexer.weights_proj.weight.copy_(weights[p + "index_weights"])
        x = ops.rms_norm(hidden, weights[p + "attn_norm"], model.norm_eps)
        latent = ops.rms_norm(x @ weights[p + "q_a"].t(), weights[p + "q_a_norm"], model.latent_norm_eps)
        tables = tuple(torch.cat([table, table], dim=-1)[None] for table in (cos, sin))
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, -torch.inf)[None]
        want = indexer(x[None], latent[None], tables, mask, torch.arange(TOKENS)[None])
    want = want[0, TOP - 1 :].long().sort(dim=-1).values
    assert torch.equal(got, want) == (mistake is None)
