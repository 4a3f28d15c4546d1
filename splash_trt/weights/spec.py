"""The list of a model's tensors, with the engine's names, shapes and cuts, that loading, memory and engines share.

D hidden, H heads, Q query latent, L kv latent, R rope part, E experts, I intermediate, V vocabulary, N ranks;
Hi, di heads and head size of the indexer.
Head-cut tensors have heads as their first axis (so the output projection is stored transposed): a rank's heads are one
contiguous block, which a switch can bring to another rank with one copy per tensor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

from splash_trt.models.config import LayerKind, ModelConfig


class Cut(str, Enum):
    """What of a tensor is divided over the ranks. It is always the axis `TensorSpec.axis` that is cut."""

    NONE = "none"  # a copy on every rank
    HEADS = "heads"  # of attention; only for these does the layout decide which part a rank holds
    EXPERTS = "experts"  # each rank has some experts, whole
    INSIDE_EXPERTS = "inside_experts"  # each rank has a share of every expert's intermediate size
    INTERMEDIATE = "intermediate"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    cut: Cut = Cut.NONE
    axis: int = 0
    stretches: int = 1
    """The axis consists of this many stretches of equal length, each cut in the same way: gate's rows, then up's."""
    float32: bool = False
    """Kept in at least float32 whatever the engine's dtype (the router's selection bias)."""
    product: bool = False
    """A matrix to multiply with, which may be stored as config.Formats says instead of in the engine's dtype."""


@functools.lru_cache(maxsize=4096)
def partition(total: int, num_parts: int, multiple: int = 1) -> tuple[tuple[int, int], ...]:
    """Cut range(total) into num_parts consecutive [begin, end) as evenly as multiples of `multiple` allow.

    Earlier parts are the larger ones: 20 heads on 3 ranks are 7 + 7 + 6. Parts may be empty.
    """
    units = -(-total // multiple)
    sizes = (units // num_parts + (part < units % num_parts) for part in range(num_parts))
    ends = [min(total, multiple * end) for end in accumulate(sizes)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _attention(model: ModelConfig, prefix: str) -> list[TensorSpec]:
    heads, hidden = model.num_heads, model.hidden_size
    q_in = model.q_lora_rank or hidden
    specs = [TensorSpec(name=prefix + "attn_norm", shape=(hidden,))]
    kv_a = TensorSpec(name=prefix + "kv_a", shape=(model.row_width, hidden), product=True)
    if model.q_lora_rank:
        # q_a and kv_a are adjacent: they have the same input, so both together can be computed as one product.
        specs += [TensorSpec(name=prefix + "q_a", shape=(model.q_lora_rank, hidden), product=True), kv_a]
        specs.append(TensorSpec(name=prefix + "q_a_norm", shape=(model.q_lora_rank,)))
        if model.attention_bias:
            specs.append(TensorSpec(name=prefix + "q_a_bias", shape=(model.q_lora_rank,)))
    else:
        specs.append(kv_a)
    specs.append(TensorSpec(name=prefix + "kv_a_norm", shape=(model.kv_lora_rank,)))
    for name, shape in (
        ("q_b", (heads, model.qk_head_dim, q_in)),
        ("w_uk", (heads, model.qk_nope_head_dim, model.kv_lora_rank)),
        ("w_uv", (heads, model.v_head_dim, model.kv_lora_rank)),
        ("o", (heads, model.v_head_dim, hidden)),
    ):
        specs.append(TensorSpec(name=prefix + name, shape=shape, cut=Cut.HEADS, product=True))
    if model.attention_bias:
        specs.append(TensorSpec(name=prefix + "kv_a_bias", shape=(model.row_width,)))
        specs.append(TensorSpec(name=prefix + "o_bias", shape=(hidden,)))
    return specs + _indexer(model, prefix)


def _indexer(model: ModelConfig, prefix: str) -> list[TensorSpec]:
    """index_q [Hi, di, Q], index_k [di, D], the key's LayerNorm (weight and bias [di]), index_weights [Hi, D]."""
    indexer, hidden = model.indexer, model.hidden_size
    if indexer is None:
        return []
    assert model.q_lora_rank is not None, "the indexer reads the query latent"
    heads, dim = indexer.num_heads, indexer.head_dim
    return [
        TensorSpec(name=prefix + "index_q", shape=(heads, dim, model.q_lora_rank), product=True),
        TensorSpec(name=prefix + "index_k", shape=(dim, hidden), product=True),
        TensorSpec(name=prefix + "index_k_norm", shape=(dim,)),
        TensorSpec(name=prefix + "index_k_norm_bias", shape=(dim,)),
        TensorSpec(name=prefix + "index_weights", shape=(heads, hidden)),
    ]


def _gated(prefix: str, hidden: int, intermediate: int) -> list[TensorSpec]:
    """A gated MLP: gate_up [2, I, D] (gate first), down [D, I]."""
    cut = Cut.INTERMEDIATE
    return [
        TensorSpec(name=prefix + "gate_up", shape=(2, intermediate, hidden), cut=cut, axis=1, product=True),
        TensorSpec(name=prefix + "down", shape=(hidden, intermediate), cut=cut, axis=1, product=True),
    ]


def _experts(prefix: str, num_experts: int, inner: int, hidden: int, experts_cut: str) -> list[TensorSpec]:
    """Routed experts: gate_up [E, 2 I, D] (gate first in each expert), down [E, D, I]."""
    whole = (
        TensorSpec(name=prefix + "gate_up", shape=(num_experts, 2 * inner, hidden), cut=Cut.EXPERTS, product=True),
        TensorSpec(name=prefix + "down", shape=(num_experts, hidden, inner), cut=Cut.EXPERTS, product=True),
    )
    if experts_cut == "whole":
        return list(whole)
    gate_up, down = (replace(spec, cut=Cut.INSIDE_EXPERTS) for spec in whole)
    return [replace(gate_up, axis=1, stretches=2), replace(down, axis=2)]


def part_of_experts(shape: tuple[int, ...], axis: int, begin: int, end: int) -> tuple[range, range, slice]:
    """The experts, rows and columns that [begin, end) along `axis` of a tensor [E, rows, columns] covers."""
    whole = [(0, size) for size in shape]
    whole[axis] = (begin, end)
    experts, rows, columns = whole
    return range(*experts), range(*rows), slice(*columns)


def _moe(model: ModelConfig, prefix: str, experts_cut: str) -> list[TensorSpec]:
    moe, hidden = model.experts, model.hidden_size
    assert moe is not None
    experts, inner = moe.num_experts, moe.intermediate_size
    specs = [TensorSpec(name=prefix + "router", shape=(experts, hidden))]
    if moe.selection_bias:
        specs.append(TensorSpec(name=prefix + "router_bias", shape=(experts,), float32=True))
    specs += _experts(prefix + "experts.", experts, inner, hidden, experts_cut)
    if moe.shared_intermediate_size:
        specs += _gated(prefix + "shared.", hidden, moe.shared_intermediate_size)
    return specs


def tensor_specs(model: ModelConfig, experts_cut: str = "whole") -> list[TensorSpec]:
    """Every tensor of the model, layer after layer; without the head if it is the embedding (tied).

    experts_cut: as in EngineConfig. It decides how experts' tensors are cut, but not their shapes.
    """
    vocab, hidden = model.vocab_size, model.hidden_size
    specs = [TensorSpec(name="embed", shape=(vocab, hidden), cut=Cut.VOCABULARY)]
    for index, kind in enumerate(model.layers):
        prefix = f"layers.{index}."
        specs += _attention(model, prefix)
        specs.append(TensorSpec(name=prefix + "mlp_norm", shape=(hidden,)))
        if kind is LayerKind.DENSE:
            specs += _gated(prefix, hidden, model.intermediate_size)
        else:
            specs += _moe(model, prefix, experts_cut)
    specs.append(TensorSpec(name="final_norm", shape=(hidden,)))
    if not model.tied_embeddings:
        specs.append(TensorSpec(name="head", shape=(vocab, hidden), cut=Cut.VOCABULARY))
    return specs
