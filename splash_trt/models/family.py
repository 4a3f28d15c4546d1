"""The model types, one entry of FAMILIES each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from splash_trt.models.config import Indexer


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the configurations of one model type may say, and the defaults of what they do not say.

    The defaults are those of transformers' configuration class of the type.
    """

    scorings: tuple[str, ...]
    """Allowed values of scoring_func; the first is the default."""
    topk_methods: tuple[str, ...]
    """Allowed values of topk_method; the first is the default."""
    groups: tuple[int, int] | None
    """Defaults of n_group and topk_group; None: a method with groups must say them."""
    normalize: bool | None
    """Default of norm_topk_prob; None: the weights are never normalised, whatever norm_topk_prob says."""
    scale: float
    shared_experts: int
    first_dense: int
    mlp_layer_types: bool
    """Whether mlp_layer_types may list the layers' kinds; it takes precedence over first_k_dense_replace."""
    rope_choice: bool
    """Whether rope_interleave may be false."""
    norm_eps: float
    indexer: Indexer | None = None
    """Defaults of the index_ fields; None: the type has no indexer."""
    indexer_interleaved: bool = False
    """Whether the indexer rotates neighbouring pairs (or else halves); attention may do otherwise."""
    indexer_sharing: bool = False
    """Whether the type knows layers that use an earlier layer's choice instead of an indexer; see parse_indexer."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # The official code raises for other scores and methods than these. It normalises if norm_topk_prob is true;
        # transformers never does, which is followed here: all published configurations of the type say false.
        "deepseek_v2": Family(
            scorings=("softmax",),
            topk_methods=("greedy", "group_limited_greedy"),
            groups=None,
            normalize=None,
            scale=1.0,
            shared_experts=2,
            first_dense=0,
            mlp_layer_types=False,
            rope_choice=False,
            norm_eps=1e-6,
        ),
        # transformers always scores by sigmoid and selects by noaux_tc here; a configuration that says otherwise is
        # followed, as vLLM and SGLang do.
        "deepseek_v3": Family(
            scorings=("sigmoid", "softmax"),
            topk_methods=("noaux_tc", "greedy", "group_limited_greedy"),
            groups=(8, 4),
            normalize=True,
            scale=2.5,
            shared_experts=1,
            first_dense=3,
            mlp_layer_types=False,
            rope_choice=True,
            norm_eps=1e-6,
        ),
        # transformers ignores first_k_dense_replace here; without mlp_layer_types it is followed, as vLLM does.
        "glm4_moe_lite": Family(
            scorings=("sigmoid", "softmax"),
            topk_methods=("noaux_tc", "greedy", "group_limited_greedy"),
            groups=(1, 1),
            normalize=True,
            scale=1.8,
            shared_experts=1,
            first_dense=1,
            mlp_layer_types=True,
            rope_choice=True,
            norm_eps=1e-5,
        ),
        # These two are like the two above, with an indexer. transformers has dropped rope_interleave for them:
        # attention always rotates neighbouring pairs.
        "deepseek_v32": Family(
            scorings=("sigmoid", "softmax"),
            topk_methods=("noaux_tc", "greedy", "group_limited_greedy"),
            groups=(8, 4),
            normalize=True,
            scale=2.5,
            shared_experts=1,
            first_dense=3,
            mlp_layer_types=True,
            rope_choice=False,
            norm_eps=1e-6,
            indexer=Indexer(num_heads=64, head_dim=128, top_k=2048),
        ),
        "glm_moe_dsa": Family(
            scorings=("sigmoid", "softmax"),
            topk_methods=("noaux_tc", "greedy", "group_limited_greedy"),
            groups=(1, 1),
            normalize=True,
            scale=2.5,
            shared_experts=1,
            first_dense=3,
            mlp_layer_types=True,
            rope_choice=False,
            norm_eps=1e-5,
            indexer=Indexer(num_heads=32, head_dim=128, top_k=2048),
            indexer_interleaved=True,
            indexer_sharing=True,
        ),
    }
)
