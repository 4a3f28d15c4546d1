"""The indexer's fields of a configuration, as transformers 5.24's classes of deepseek_v32 and glm_moe_dsa read them."""

from __future__ import annotations

from splash_trt.models.config import Indexer
from splash_trt.models.fields import Fields

INDEXER_KEYS = frozenset("index_n_heads index_head_dim index_topk indexer_rope_interleave layer_types".split())
SHARING_KEYS = frozenset("indexer_types index_topk_pattern index_topk_freq index_skip_topk_offset".split())

LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
"""transformers' present name, and its earlier one."""


def parse_indexer(fields: Fields, defaults: Indexer, num_layers: int, rope_dim: int, *, interleaved: bool) -> Indexer:
    """The indexer that every layer has. interleaved: how the model type rotates its queries and keys.

    ValueError for a field of the wrong type or range, and for layers that have no indexer of their own.
    """
    indexer = Indexer(
        num_heads=fields.size("index_n_heads", defaults.num_heads),
        head_dim=fields.size("index_head_dim", defaults.head_dim),
        top_k=fields.size("index_topk", defaults.top_k),
    )
    if indexer.head_dim < rope_dim:
        fields.wrong("index_head_dim", f"at least {rope_dim}, qk_rope_head_dim: that part of it is rotated")
    if fields.has("indexer_rope_interleave") and fields.flag("indexer_rope_interleave") != interleaved:
        pairs = "neighbouring pairs" if interleaved else "halves"
        fields.wrong("indexer_rope_interleave", f"{str(interleaved).lower()}: this indexer rotates {pairs}")
    if fields.has("layer_types"):
        types = fields.data["layer_types"]
        if not isinstance(types, list) or len(types) != num_layers or any(word not in LAYER_TYPES for word in types):
            fields.wrong("layer_types", f"a list of {num_layers} times {LAYER_TYPES[0]!r}, once a layer")
    _refuse_sharing(fields, num_layers)
    return indexer


def _refuse_sharing(fields: Fields, num_layers: int) -> None:
    """Raises ValueError for layers that use an earlier layer's choice, which ModelConfig cannot express. Of the fields
    that say so, indexer_types takes precedence over index_topk_pattern, and that over the others."""
    kinds = {"full": True, "shared": False, "F": True, "S": False}
    for key in ("indexer_types", "index_topk_pattern"):
        if not fields.has(key):
            continue
        value = fields.data[key]
        words = list(value) if isinstance(value, (list, str)) else []
        if len(words) != num_layers or any(not isinstance(word, str) or word not in kinds for word in words):
            fields.wrong(key, f"{num_layers} entries, one a layer, each full or shared")
        if not all(kinds[word] for word in words):
            _no_sharing(fields, key)
        return
    every = fields.size("index_topk_freq", 1, low=0)
    first = fields.size("index_skip_topk_offset", 2, low=0)
    if every > 1 and any(max(layer - first + 1, 0) % every for layer in range(num_layers)):
        _no_sharing(fields, "index_topk_freq")


def _no_sharing(fields: Fields, key: str) -> None:
    fields.wrong(key, "such that every layer has its own indexer: layers that share one are not supported")
