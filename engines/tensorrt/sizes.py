"""The sizes that a network is made for: the shapes of one rank's weights under one residency, and some of the model's
numbers. Ranks or layouts with equal sizes share their networks.
"""

from __future__ import annotations

from dataclasses import dataclass

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.shards import Block, others_block, own_block

Shapes = tuple[tuple[str, tuple[int, ...], bool], ...]
"""(name, shape, whether it is kept in float32) of each tensor, sorted. Names are block.tensor without a layer's number,
such as own.embed or others.q_b."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    dense: Shapes
    """The tensors of a dense layer, the embedding and the head; of a layer without the MLP if all layers are MoE."""
    moe: Shapes
    """The same with a MoE layer's experts; empty if the model has none."""
    attend_heads: tuple[int, ...]
    """First the number of heads of absorbed queries where they attend, then that of each block of expanded queries."""
    sharded: bool
    """Other ranks have heads that this one does not have, so the output projection's results are summed over ranks."""
    page_tokens: int


def sizes_of(model: ModelConfig, layout: Layout, rank: int, num_ranks: int, page_tokens: int) -> Sizes:
    spec = SPECS[layout]
    own = own_block(model, rank, num_ranks, "float32")
    blocks = {"own": own}
    if spec.residency is Residency.FULL and num_ranks > 1:
        blocks["others"] = others_block(model, rank, num_ranks, "float32")
    kinds = {kind: model.layers.index(kind) for kind in LayerKind if kind in model.layers}
    heads = [_heads(block) for block in blocks.values()]
    # Where they attend, absorbed queries have all heads in DOP (at the owner) and under FULL, else the rank's own.
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
    """A tensor's name in a network, without the layer's number; None for a tensor of another layer."""
    if not name.startswith("layers."):
        return name
    prefix = f"layers.{layer}."
    return name[len(prefix) :] if name.startswith(prefix) else None


def _heads(block: Block) -> int:
    return next(shard.shape[0] for shard in block.shards if shard.spec.name.endswith(".q_b"))
