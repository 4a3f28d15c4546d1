"""Which part of each tensor a rank has, and where it is in the rank's two blocks of weights. Pure arithmetic.

`own` is always there: the rank's part of every cut tensor and a copy of every uncut one. `others` holds the other
ranks' heads while residency is FULL, in rank order within each tensor, so that each rank's part of a tensor arrives by
one contiguous copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from splash_trt.config import Formats
from splash_trt.models.config import ModelConfig
from splash_trt.weights.formats import ITEMSIZE, PLAIN, bytes_of, format_of
from splash_trt.weights.spec import Cut, TensorSpec, partition, tensor_specs

ALIGNMENT = 256  # bytes; enough for vector loads and tensor copies


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tensor's place in a block. `parts` are ranges along spec.axis, which are concatenated there."""

    spec: TensorSpec
    parts: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    itemsize: int
    offset: int
    """Bytes from the block's begin."""
    num_bytes: int
    """Includes scales if the format has them."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Tensors laid one after another, each aligned."""

    shards: tuple[Shard, ...]
    num_bytes: int


def cut_ranges(spec: TensorSpec, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each rank along spec.axis, or along the first of its stretches if it has several. Intermediate
    sizes that are multiples of 128, and at least 128 per rank, are cut at multiples of 128 (FP8 scales are for blocks
    of 128); others are cut evenly."""
    total = spec.shape[spec.axis] // spec.stretches
    if spec.cut is Cut.NONE:
        return ((0, total),) * num_ranks
    intermediate = spec.cut in (Cut.INTERMEDIATE, Cut.INSIDE_EXPERTS)
    blocks = intermediate and total % 128 == 0 and total >= 128 * num_ranks
    return partition(total, num_ranks, 128 if blocks else 1)


def own_parts(spec: TensorSpec, rank: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """For each stretch of the tensor, [begin, end) along spec.axis of the part that rank `rank` has."""
    begin, end = cut_ranges(spec, num_ranks)[rank]
    length = spec.shape[spec.axis] // spec.stretches
    return tuple((i * length + begin, i * length + end) for i in range(spec.stretches))


def first_expert(model: ModelConfig, rank: int, num_ranks: int, experts_cut: str = "whole") -> int:
    """The number of the first routed expert on rank `rank`; 0 if it has a part of every expert, or there are none."""
    spec = next((s for s in tensor_specs(model, experts_cut) if s.cut is Cut.EXPERTS), None)
    return 0 if spec is None else cut_ranges(spec, num_ranks)[rank][0]


def _block(entries: list[tuple[TensorSpec, tuple[tuple[int, int], ...]]], dtype: str, formats: Formats) -> Block:
    shards, offset = [], 0
    for spec, parts in entries:
        length = sum(end - begin for begin, end in parts)
        shape = (*spec.shape[: spec.axis], length, *spec.shape[spec.axis + 1 :])
        stored = format_of(spec, dtype, formats)
        size, num_bytes = ITEMSIZE[stored], bytes_of(shape, stored)
        shards.append(Shard(spec=spec, parts=parts, shape=shape, itemsize=size, offset=offset, num_bytes=num_bytes))
        offset = align(offset + num_bytes)
    return Block(shards=tuple(shards), num_bytes=offset)


def own_block(
    model: ModelConfig,
    rank: int,
    num_ranks: int,
    dtype: str,
    formats: Formats = PLAIN,
    experts_cut: str = "whole",
) -> Block:
    """What rank `rank` of num_ranks always holds; dtype, formats and experts_cut: as in EngineConfig."""
    specs = tensor_specs(model, experts_cut)
    return _block([(s, own_parts(s, rank, num_ranks)) for s in specs], dtype, formats)


def others_block(model: ModelConfig, rank: int, num_ranks: int, dtype: str, formats: Formats = PLAIN) -> Block:
    """What rank `rank` of num_ranks holds in addition while residency is FULL: every other rank's heads."""
    entries = []
    for spec in tensor_specs(model):
        if spec.cut is Cut.HEADS:
            ranges = cut_ranges(spec, num_ranks)
            entries.append((spec, tuple(ranges[r] for r in range(num_ranks) if r != rank)))
    return _block(entries, dtype, formats)


def heads_of(model: ModelConfig, num_ranks: int) -> tuple[int, ...]:
    """Attention heads per rank."""
    return tuple(end - begin for begin, end in partition(model.num_heads, num_ranks))


def others_begin(heads: tuple[int, ...], source: int, target: int, numbers: int) -> int:
    """The offset, in numbers, of rank `source`'s part of a tensor in that tensor of rank `target`'s `others`.

    numbers: the tensor's numbers per head.
    """
    return numbers * sum(count for rank, count in enumerate(heads[:source]) if rank != target)
