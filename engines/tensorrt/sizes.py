"""What a network is made for: the shapes of one rank's weights under one residency, and a few of the model's numbers.

Two ranks, or two layouts, of equal sizes share their networks.
"""

from __future__ import annotations

from dataclasses import dataclass

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.shards import Block, others_block, own_block

Shapes = tuple[tuple[str, tuple[int, ...], bool], ...]
"""(name, shape, kept in float32) of each tensor, sorted. Names have no layer's number: own.embed, others.q_b, …"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    dense: Shapes
    """What a dense layer, the embedding and the head are made of; of an all-MoE model without the MLP."""
    moe: Shapes
    """The same with a MoE layer's experts; empty where the model has none."""
    attend_heads: tuple[int, ...]
    """Heads that absorbed queries have where they meet cache rows, and those of each block of expanded ones."""
    sharded: bool
    """Other ranks have heads that this one lacks, so the output projection's results are summed over ranks."""
    page_tokens: int


def sizes_of(model: ModelConfig, layout: Layout, rank: int, num_ranks: int, page_tokens: int) -> Sizes:
    spec = SPECS[layout]
    own = own_block(model, rank, num_ranks, "float32")
    blocks = {"own": own}
    if spec.residency is Residency.FULL and num_ranks > 1:
        blocks["others"] = others_block(model, rank, num_ranks, "float32")
    kinds = {kind: model.layers.index(kind) for kind in LayerKind if kind in model.layers}
    heads = [_heads(block) for block in blocks.values()]
    # At an owner, DOP's queries have all heads; elsewhere those that are here.
    everywhere = spec.placement is PlacementKind.OWNED or len(blocks) > 1
    absorbed = model.num_heads if everywhere else heads[0]
    moe = _shapes(blocks, kinds[LayerKind.MOE]) if LayerKind.MOE in kinds else ()
    return Sizes(
        dense=_shapes(blocks, kinds[LayerKind.DENSE]) if LayerKind.DENSE in kinds else _without_experts(moe),
        moe=moe,
        attend_heads=(absorbed, *(count for count in heads if count)),
        sharded=spec.residency is Residency.SHARD and num_ranks > 1,
        page_tokens=page_tokens,
    )


def _shapes(blocks: dict[str, Block], layer: int) -> Shapes:
    found = []
    for block, held in blocks.items():
        for shard in held.shards:
            name = local_name(shard.spec.name, layer)
            if name is not None:
                found.append((f"{block}.{name}", shard.shape, shard.spec.float32))
    return tuple(sorted(found))


def _without_experts(shapes: Shapes) -> Shapes:
    return tuple(s for s in shapes if not s[0].startswith(("own.experts.", "own.shared.", "own.router")))


def local_name(name: str, layer: int) -> str | None:
    """A tensor's name as a network calls it: without the layer; None for a tensor of another layer."""
    if not name.startswith("layers."):
        return name
    prefix = f"layers.{layer}."
    return name[len(prefix) :] if name.startswith(prefix) else None


def _heads(block: Block) -> int:
    return next(shard.shape[0] for shard in block.shards if shard.spec.name.endswith(".q_b"))
