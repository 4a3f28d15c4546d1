"""Models and batches that the cost model's tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from splash_trt.config import EngineConfig, Formats, Layout
from splash_trt.models.config import (
    Experts,
    GroupScore,
    Indexer,
    LayerKind,
    ModelConfig,
    Rope,
    Scoring,
)
from splash_trt.models.families import load_config
from splash_trt.scheduler.batch import Batch

ROOT = Path(__file__).resolve().parents[2]


def splash_tiny() -> ModelConfig:
    return load_config(ROOT / "models" / "splash-tiny")


def deepseek_v3(indexer: bool = False) -> ModelConfig:
    """At full size: 671 billion parameters, 37 of them active (arXiv 2412.19437); the indexer is V3.2's."""
    return ModelConfig(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=18432,
        layers=(LayerKind.DENSE,) * 3 + (LayerKind.MOE,) * 58,
        experts=Experts(
            num_experts=256,
            top_k=8,
            intermediate_size=2048,
            shared_intermediate_size=2048,
            scoring=Scoring.SIGMOID,
            selection_bias=True,
            num_groups=8,
            top_groups=4,
            group_score=GroupScore.TOP2_SUM,
            normalize=True,
            scale=2.5,
        ),
        rope=Rope(theta=10000.0, interleaved=True),
        softmax_scale=192**-0.5,
        norm_eps=1e-6,
        latent_norm_eps=1e-6,
        attention_bias=False,
        tied_embeddings=False,
        max_positions=163840,
        eos_token_ids=(1,),
        dtype="bfloat16",
        indexer=Indexer(num_heads=64, head_dim=128, top_k=2048) if indexer else None,
    )


def config(num_ranks: int, formats: Formats | None = None, dtype: str = "bfloat16") -> EngineConfig:
    return EngineConfig(
        num_ranks=num_ranks, dtype=dtype, formats=formats or Formats(), max_batch_tokens=8192, max_running=4096
    )


def spread(total: int, num_ranks: int) -> np.ndarray:
    """[N]: `total` dealt out in turn."""
    return np.array([total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)], np.float64)


def decode(layout: Layout, num_ranks: int, requests: int, context: int) -> Batch:
    """One token of each request, whose row is the context's last; requests are dealt out to ranks in turn."""
    tokens = spread(requests, num_ranks)
    none = np.zeros(num_ranks)
    return Batch(
        layout=layout,
        decode_tokens=tokens,
        decode_context=tokens * context,
        prefill_tokens=none,
        prefill_pairs=none,
        prefill_context=none,
        sampled=requests,
        decode_longest=context,
    )


def prefill(layout: Layout, num_ranks: int, tokens: int, start: int = 0) -> Batch:
    """A chunk of one prompt, of rank 0."""
    first = np.zeros(num_ranks)
    first[0] = 1
    return Batch(
        layout=layout,
        decode_tokens=np.zeros(num_ranks),
        decode_context=np.zeros(num_ranks),
        prefill_tokens=first * tokens,
        prefill_pairs=first * tokens * (start + (tokens + 1) / 2),
        prefill_context=first * (start + tokens),
        sampled=0,
    )
