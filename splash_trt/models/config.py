"""ModelConfig: a model's sizes and choices as the engine uses them, whatever family its config.json is of.

H heads, D hidden size, L latent (kv_lora_rank), R rope part, Q query latent (q_lora_rank), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LayerKind(str, Enum):
    DENSE = "dense"
    MOE = "moe"


class Scoring(str, Enum):
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class GroupScore(str, Enum):
    """How a group of experts is scored before the best groups are kept (when num_groups > 1)."""

    MAX = "max"  # group_limited_greedy
    TOP2_SUM = "top2_sum"  # noaux_tc


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's parameters, by which rotary frequencies are scaled for longer contexts (arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """The factor by which cos and sin are multiplied."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    theta: float
    interleaved: bool
    """True: pairs are (2i, 2i + 1); False: (i, i + R / 2)."""
    yarn: Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed and shared experts of a mixture-of-experts layer."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one routed expert."""
    shared_intermediate_size: int
    """Of all shared experts together; 0: none."""
    scoring: Scoring
    selection_bias: bool
    """Whether a learned bias is added to the scores, for choosing experts only and not for their weights (noaux_tc)."""
    num_groups: int
    top_groups: int
    group_score: GroupScore
    normalize: bool
    """Whether the chosen experts' weights are divided by their sum (plus 1e-20)."""
    scale: float
    """routed_scaling_factor, by which the weights are multiplied last."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Chooses the cache rows that a token attends to (DeepSeek sparse attention, DeepSeek-V3.2-Exp's report)."""

    num_heads: int
    head_dim: int
    """Also how many numbers a token's cache row has in addition: the indexer's key."""
    top_k: int
    """The most rows that a token attends to."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    """Of a dense layer's MLP."""
    layers: tuple[LayerKind, ...]
    experts: Experts | None
    rope: Rope
    softmax_scale: float
    """The factor of q·k before the softmax: (nope + rope)^-1/2, times mscale² if YaRN has it."""
    norm_eps: float
    latent_norm_eps: float
    """Of the norms inside attention (q_a, kv_a)."""
    attention_bias: bool
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's dtype, which is only the default for the engine's."""
    indexer: Indexer | None = None
    """None: a token attends to all rows before it."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def row_width(self) -> int:
        """Numbers in a token's cache row in one layer: L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim
