"""How many bytes weights and cache rows take: in a plain dtype, or in FP8 with scales. Pure arithmetic.

FP8 is as DeepSeek published it for V3 and V3.2. Weights have a float32 scale for each block of 128 x 128 in their last
two dimensions. A cache row has one for each 128 numbers of its latent part and of its indexer key; its rope part stays
bfloat16 (the 656 bytes per token of FlashMLA's FP8 cache: 512 + 4 * 4 + 64 * 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from splash_trt.config import EngineConfig, Formats
from splash_trt.models.config import ModelConfig
from splash_trt.weights.spec import Cut, TensorSpec

ITEMSIZE: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "fp8": 1})
"""Bytes of one number, without scales."""
SCALED = "fp8"
BLOCK = 128
SCALE_BYTES = 4
PLAIN = Formats()
"""Everything in the engine's dtype."""


def format_of(spec: TensorSpec, dtype: str, formats: Formats) -> str:
    """The format in which a tensor is stored, in an engine that computes in `dtype`. `formats` applies only to matrices
    that are multiplied with (spec.product): norms, biases, the router, the indexer's head weights, embedding and head
    stay in dtype, as in published FP8 checkpoints."""
    if spec.product:
        chosen = formats.attention if spec.cut is Cut.HEADS else formats.weights
        if chosen is not None:
            return chosen
    return "float32" if spec.float32 and ITEMSIZE[dtype] < 4 else dtype


def bytes_of(shape: Sequence[int], stored: str) -> int:
    """Bytes of a tensor in format `stored`, scales included. A tensor with scales has at least two dimensions."""
    num_bytes = math.prod(shape) * ITEMSIZE[stored]
    if stored == SCALED:
        num_bytes += SCALE_BYTES * math.prod(shape[:-2]) * math.prod(_blocks(size) for size in shape[-2:])
    return num_bytes


def row_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one token's cache row in one layer: latent part, rope part and, if the model has an indexer, its key."""
    stored = config.formats.cache or config.dtype
    key = model.indexer.head_dim if model.indexer else 0
    if stored != SCALED:
        return (model.row_width + key) * ITEMSIZE[stored]
    scales = SCALE_BYTES * (_blocks(model.kv_lora_rank) + _blocks(key))
    return model.kv_lora_rank + key + scales + model.qk_rope_head_dim * ITEMSIZE["bfloat16"]


def head_itemsize(config: EngineConfig) -> int:
    """Bytes of one number of the head-cut tensors. FP8's scales are neglected: 4 bytes in 16,384, 0.02 %."""
    return ITEMSIZE[config.formats.attention or config.dtype]


def _blocks(size: int) -> int:
    return -(-size // BLOCK)
