"""What a deployment's memory holds, by the server's own arithmetic (memory/map.py), as values for a table or JSON."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from splash_trt.config import EngineConfig, Formats, Layout
from splash_trt.layout.spec import PlacementKind
from splash_trt.memory.map import Capacity, capacity, memory_map
from splash_trt.models.config import ModelConfig
from splash_trt.weights.formats import row_bytes
from splash_trt.weights.shards import align, own_block
from splash_trt.weights.spec import Cut, tensor_specs

KINDS = {
    Cut.EXPERTS: "experts",
    Cut.INSIDE_EXPERTS: "experts",
    Cut.INTERMEDIATE: "dense_and_shared_mlps",
    Cut.HEADS: "attention_resident",
    Cut.NONE: "replicated",
    Cut.VOCABULARY: "embedding_and_head",
}
CUTS = {"whole": "each whole on one rank", "inside": "a slice of each on every rank"}
"""By EngineConfig.experts_cut: how routed experts are divided over ranks."""
OTHERS = "attention_others"
"""The other ranks' heads, which a rank holds only in DP and CP."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Requests of `prompt` tokens that produce `output` tokens each."""

    prompt: int
    output: int

    def pages(self, page_tokens: int) -> int:
        """Pages of a request at its end."""
        return -(-(self.prompt + self.output) // page_tokens)

    def mean_pages(self, page_tokens: int) -> Fraction:
        """Pages of a request on average over its output tokens."""
        before, after = (_summed_pages(n, page_tokens) for n in (self.prompt, self.prompt + self.output))
        return Fraction(after - before, self.output)


def _summed_pages(tokens: int, page_tokens: int) -> int:
    """ceil(1 / page_tokens) + ceil(2 / page_tokens) + … + ceil(tokens / page_tokens)."""
    full, rest = divmod(tokens, page_tokens)
    return page_tokens * full * (full + 1) // 2 + rest * (full + 1)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many requests of these lengths the cache holds at once."""

    lengths: Lengths
    full_length: int
    """If all are at their last token: so many never run out of room."""
    mean_length: int
    """If each has the pages that it has on average: so many fit on average in a long run, but not always."""


@dataclass(frozen=True, kw_only=True)
class LayoutRoom:
    """One layout's cache."""

    layout: str
    tokens_per_rank: tuple[int, ...]
    """Tokens that each rank's pages hold, including copies of tokens that other ranks hold; empty if there is no room.
    """
    total_tokens: int
    """Distinct tokens that all ranks hold together."""
    request_tokens: int
    """Tokens of the longest request that fits alone."""
    batches: tuple[Batch, ...]
    no_room: str | None
    """Why this layout does not fit; None if it does."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One choice of formats."""

    formats: dict[str, str]
    weights_bytes: tuple[dict[str, int], ...]
    """For each rank {kind: bytes}."""
    workspace_bytes: int
    page_bytes: int
    row_bytes: int
    """Bytes of one token's cache row in one layer."""
    layouts: tuple[LayoutRoom, ...]
    dop_over_dp_percent: float | None
    """By how many percent DOP's total_tokens are above DP's; None if DP does not fit."""
    dop_over_tp: float | None
    """DOP's total_tokens over TP's; None if TP does not fit."""


def weights_by_kind(model: ModelConfig, config: EngineConfig, rank: int) -> dict[str, int]:
    """{kind: bytes} of one rank's weights, alignment included. All kinds but OTHERS add up to its `own` block."""
    arguments = (model, rank, config.num_ranks, config.dtype, config.formats, config.experts_cut)
    found: Counter[str] = Counter(dict.fromkeys(KINDS.values(), 0))
    for shard in own_block(*arguments).shards:
        found[KINDS[shard.spec.cut]] += align(shard.num_bytes)
    return {**found, OTHERS: memory_map(model, config, rank).others_bytes}


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the model, without layers for multi-token prediction."""
    return sum(math.prod(spec.shape) for spec in tensor_specs(model))


def largest_batch(room: Capacity, pages: int | Fraction) -> int:
    """How many requests of `pages` pages each fit at once, with the best placement."""
    per_rank = room.pages_per_rank
    if room.placement is PlacementKind.REPLICATED:
        return math.floor(min(per_rank) / Fraction(pages))
    if room.placement is PlacementKind.OWNED:
        return sum(math.floor(held / Fraction(pages)) for held in per_rank)
    # Stripes that follow each other around the ranks give each rank the same number of pages, to within one.
    return math.floor(min(per_rank) * len(per_rank) / Fraction(pages))


def case(model: ModelConfig, config: EngineConfig, lengths: tuple[Lengths, ...]) -> Case:
    """The report on `config` (its layout does not matter). ValueError for lengths beyond the model's context."""
    for asked in lengths:
        if asked.prompt + asked.output > model.max_positions:
            raise ValueError(
                f"lengths: {asked.prompt} + {asked.output} tokens are more than the model's {model.max_positions}"
            )
    layouts = tuple(_room(model, config, layout, lengths) for layout in Layout)
    total = {Layout.parse(room.layout): room.total_tokens for room in layouts}
    dop, dp, tp = total[Layout.DOP], total[Layout.DP], total[Layout.TP]
    sizes = memory_map(model, config, 0)
    return Case(
        formats=stored_as(config),
        weights_bytes=tuple(weights_by_kind(model, config, rank) for rank in range(config.num_ranks)),
        workspace_bytes=sizes.workspace_bytes,
        page_bytes=sizes.page_bytes,
        row_bytes=row_bytes(model, config),
        layouts=layouts,
        dop_over_dp_percent=100 * (dop / dp - 1) if dp else None,
        dop_over_tp=dop / tp if tp else None,
    )


def stored_as(config: EngineConfig) -> dict[str, str]:
    """{field of config.Formats: format}, with the configuration's dtype where a format is None."""
    formats: Formats = config.formats
    return {field: getattr(formats, field) or config.dtype for field in ("weights", "attention", "cache")}


def _room(model: ModelConfig, config: EngineConfig, layout: Layout, lengths: tuple[Lengths, ...]) -> LayoutRoom:
    name = layout.name.lower()
    try:
        room = capacity(model, config, layout)
    except ValueError as error:
        nothing = tuple(Batch(lengths=asked, full_length=0, mean_length=0) for asked in lengths)
        why = str(error).removeprefix("memory_bytes: ")  # which may have been given as a share of a device's
        return LayoutRoom(
            layout=name, tokens_per_rank=(), total_tokens=0, request_tokens=0, batches=nothing, no_room=why
        )
    size = config.page_tokens
    return LayoutRoom(
        layout=name,
        tokens_per_rank=tuple(pages * size for pages in room.pages_per_rank),
        total_tokens=room.total_tokens,
        request_tokens=room.request_tokens,
        batches=tuple(
            Batch(
                lengths=asked,
                full_length=largest_batch(room, asked.pages(size)),
                mean_length=largest_batch(room, asked.mean_pages(size)),
            )
            for asked in lengths
        ),
        no_room=None,
    )
