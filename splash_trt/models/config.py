"""What the engine knows of a model: one frozen value, whatever family its config.json came from.

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
    """YaRN's stretch of the rotary frequencies (arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """What cos and sin are multiplied by."""


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
    """A learned bias is added to the scores for choosing only (noaux_tc)."""
    num_groups: int
    top_groups: int
    group_score: GroupScore
    normalize: bool
    """The chosen weights are divided by their sum (plus 1e-20)."""
    scale: float
    """routed_scaling_factor, applied last."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Chooses the cache rows that a token attends to (DeepSeek sparse attention, DeepSeek-V3.2-Exp's report)."""

    num_heads: int
    head_dim: int
    """Also the numbers that it adds to a token's cache row: its key."""
    top_k: int
    """Rows that a token attends to at most."""


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
    """Multiplies q·k: (nope + rope)^-1/2, times mscale² where YaRN asks for it."""
    norm_eps: float
    latent_norm_eps: float
    """Of the norms inside attention (q_a, kv_a)."""
    attention_bias: bool
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """What the checkpoint is stored in; only a default for the engine's."""
    indexer: Indexer | None = None
    """None: a token attends to all rows before it."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def row_width(self) -> int:
        """Numbers in one token's cache row of one layer: L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim
