"""The operations of a step under a layout: how much each computes, reads, writes and sends, on every rank.

The operations are those that runtime/program.py puts together, one entry for all layers of a kind.
H_r heads resident on a rank (all of them where residency is FULL, else the largest shard), D hidden, L latent, R rope
part, W = L + R, Q query latent, I intermediate. A product of [T, a] with [a, b] takes 2 T a b operations and reads
a b numbers of weights once. Routing is uniform: a rank computes its share of T k choices, and of E experts
E (1 - (1 - k / E)^T) are touched; with experts cut inside, of all choices and all experts, each with its share of I.
The slowest rank is the one with the largest shard, so shards count as that large.

Launches are counted as on GPUs, where kernels are fused: a sum over ranks also adds to the residual and norms it,
latents are normed, rotated and appended in one launch, decode attention without exchange between ranks includes the
value projection, and the shared expert runs on a side stream.

Communication is counted as the bytes that the busiest rank sends or receives, whichever is more: for an all-reduce
2 (N - 1) / N of its tensor; gathers and scattered sums of spread tokens are padded to the largest count.

The indexer (DeepSeek sparse attention), as this file takes it to be executed: its projections run wherever the token's
hidden state is (everywhere in TP and DOP). Scores are taken where the keys lie: in TP each rank takes all of them, in
DP and DOP a request's owner, in CP each rank those of its stripe (decode; the best of each are gathered) or of its own
queries (prefill; keys travel with the rows). In DOP the owner tells the others its choices. Decode attends to the
chosen rows. Prefill attends expanded to everything, masked, or absorbed to chosen rows, whichever multiplies less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency, Tokens
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.scheduler.quantities import INDEX, QUANTITIES, Quantities

Terms = dict[str, float]
"""A weighted sum of quantities: {name of a quantity: its weight}."""

BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "fp8": 1 + 4 / 128**2}
"""Bytes of one number of a weight; fp8 includes its share of a block's scale."""
WIDE = 4
"""The least bytes of a number in partial results."""
EXPERT_LOOP = "expert_loop"
"""The operation whose launches count touched experts, for a runtime that computes one expert after another."""
PROMPT_LAUNCHES = 8.0
"""On GPUs, expanding prompts' context takes at least as long as so many launches, and so does attending to it: there
are few programs, and each goes through one tile after another."""
SAMPLER_PASSES = 8
"""How often a shard's logits are read or written for a sampled position: noise, filter, choice, log-probability."""
SAMPLER_COLUMNS = 5
"""Float64 numbers that ranks exchange for a sampled position."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """All operations of one name in a step, over all layers. For a collective, bytes are those sent between ranks, and
    launches the number of collectives."""

    name: str
    kind: str
    """One of device.KINDS."""
    segment: str
    """The stretch between two collectives that the operation is in; a collective is a segment of its own."""
    format: str = ""
    """The operands' format, for operations that multiply."""
    flops: Terms = field(default_factory=dict)
    bytes: Terms = field(default_factory=dict)
    launches: Terms = field(default_factory=dict)
    """The number of launches, or of collectives."""


class LayoutWork:
    """The table of a model's operations under one layout. flops, bytes, launches: [operations, len(QUANTITIES)]; times
    a batch's quantities they give each operation's numbers on every rank."""

    def __init__(self, model: ModelConfig, config: EngineConfig, layout: Layout, *, padded: bool = False) -> None:
        self.operations: tuple[Operation, ...] = tuple(_Table(model, config, layout).build())
        self.quantities = Quantities(model, config, layout, padded=padded)
        self.flops, self.bytes, self.launches = (
            matrix([getattr(op, name) for op in self.operations]) for name in ("flops", "bytes", "launches")
        )


def matrix(terms: Sequence[Terms]) -> np.ndarray:
    """[len(terms), len(QUANTITIES)]."""
    out = np.zeros((len(terms), len(QUANTITIES)))
    for row, term in zip(out, terms, strict=True):
        for name, value in term.items():
            row[INDEX[name]] = value
    return out


def row_bytes(model: ModelConfig, config: EngineConfig) -> float:
    """Bytes of one token's latent and rope part in the cache of one layer."""
    name = config.formats.cache or config.dtype
    if name == "fp8":
        return model.kv_lora_rank * (1 + 4 / 128) + 2 * model.qk_rope_head_dim
    return model.row_width * BYTES[name]


def largest_share(total: int, num_ranks: int, multiple: int = 1) -> int:
    """The most that one of num_ranks holds of `total`, cut at multiples (weights/shards.py)."""
    blocks = total % multiple == 0 and total >= multiple * num_ranks
    unit = multiple if blocks else 1
    return -(-(total // unit) // num_ranks) * unit


class _Table:
    """Builds the operations; every method adds those of one part of the model."""

    def __init__(self, model: ModelConfig, config: EngineConfig, layout: Layout) -> None:
        self.model, self.config, self.layout = model, config, layout
        self.ranks = config.num_ranks
        spec = SPECS[layout]
        self.full = spec.residency is Residency.FULL or self.ranks == 1
        self.spread = spec.tokens is Tokens.SPREAD and self.ranks > 1
        self.striped = spec.placement is PlacementKind.STRIPED and self.ranks > 1
        self.exchanged = layout is Layout.DOP and self.ranks > 1
        self.blocks = 2 if self.full and self.ranks > 1 else 1
        self.heads = model.num_heads if self.full else largest_share(model.num_heads, self.ranks)
        self.item = float(config.itemsize)
        self.weights = config.formats.weights or config.dtype
        self.attention = config.formats.attention or config.dtype
        self.row = row_bytes(model, config)
        self.out: list[Operation] = []

    def build(self) -> list[Operation]:
        model = self.model
        self._embed()
        self._attention_in(model.num_layers)
        if model.indexer is not None:
            self._indexer(model.num_layers)
        self._decode(model.num_layers)
        self._prefill(model.num_layers)
        self._attention_out(model.num_layers)
        dense = sum(kind is LayerKind.DENSE for kind in model.layers)
        self._mlp(dense, model.num_layers - dense)
        self._end()
        return self.out

    # One operation

    def _add(self, name: str, kind: str, segment: str, layers: int, launches: Terms | None = None, *,
             format: str = "", flops: Terms | None = None, bytes: Terms | None = None) -> None:  # fmt: skip
        """Add an operation that each of `layers` layers has once; terms are those of one layer."""

        def scaled(terms: Terms | None) -> Terms:
            return {quantity: layers * value for quantity, value in (terms or {}).items()}

        self.out.append(
            Operation(
                name=name, kind=kind, segment=segment, format=format,
                flops=scaled(flops), bytes=scaled(bytes), launches=scaled(launches),
            )
        )  # fmt: skip

    def _product(self, name: str, segment: str, layers: int, format: str, rows: str, inner: int, outer: int,
                 launches: Terms, *, busy: str = "one", kind: str = "gemm") -> None:  # fmt: skip
        """[rows, inner] x [inner, outer]; its weights are read where `busy` is 1."""
        flops = {rows: 2.0 * inner * outer}
        moved = {rows: (inner + outer) * self.item, busy: inner * outer * BYTES[format]}
        self._add(name, kind, segment, layers, launches, format=format, flops=flops, bytes=moved)

    def _passes(self, name: str, segment: str, layers: int, rows: str, numbers: float, launches: Terms) -> None:
        """Elementwise: `numbers` are read or written for each of `rows`."""
        self._add(name, "elementwise", segment, layers, launches, bytes={rows: numbers * self.item})

    def _collective(self, name: str, layers: int, quantity: str, bytes_each: float, launches: Terms) -> None:
        if self.ranks > 1:
            self._add(name, "collective", name, layers, launches, bytes={quantity: bytes_each})

    def _sum(self, name: str, layers: int) -> None:
        """Partial results [T, D] of all ranks added: on all of them, or each rank's own tokens on it."""
        hidden = self.model.hidden_size * self.item
        if self.spread:
            self._collective(name, layers, "here", hidden * (self.ranks - 1), {"one": 1})
        else:
            self._collective(name, layers, "all", hidden * 2 * (self.ranks - 1) / self.ranks, {"one": 1})

    # The parts of a step

    def _embed(self) -> None:
        self._passes("embed", "embed", 1, "all", 2 * self.model.hidden_size, {"one": 1})
        self._sum("embed_sum", 1)
        self._add("step", "step", "step", 1, {"one": 1})

    def _attention_in(self, layers: int) -> None:
        m, one = self.model, {"one": 1.0}
        q_in = m.q_lora_rank or m.hidden_size
        latent = (m.q_lora_rank or 0) + m.row_width
        self._passes("attn_norm", "attn_in", layers, "here", 4 * m.hidden_size, one if self.ranks == 1 else {})
        self._product("qkv_a", "attn_in", layers, self.weights, "here", m.hidden_size, latent, one, busy="busy")
        self._passes("latent_norms", "attn_in", layers, "here", 2 * latent, one)
        blocks = {"one": float(self.blocks)}
        outer = self.heads * m.qk_head_dim
        self._product("q_up", "attn_in", layers, self.attention, "here", q_in, outer, blocks, busy="busy")
        rotated = 2 * self.heads * m.qk_rope_head_dim + 2 * m.row_width
        self._passes("rope_append", "attn_in", layers, "here", rotated, {})  # with the norms before, and with absorb

    def _indexer(self, layers: int) -> None:
        m, one = self.model, {"one": 1.0}
        indexer = m.indexer
        assert indexer is not None
        width = indexer.num_heads * indexer.head_dim
        q_in = m.q_lora_rank or m.hidden_size
        project = dict(kind="indexer", busy="busy")
        self._product("index_q", "attn_in", layers, self.weights, "here", q_in, width, one, **project)
        keys = indexer.head_dim + indexer.num_heads  # and the heads' weights
        self._product("index_k", "attn_in", layers, self.weights, "here", m.hidden_size, keys, {"one": 2}, **project)
        cache = self.config.formats.cache or self.config.dtype
        key = indexer.head_dim * (1 + 4 / 128 if cache == "fp8" else BYTES[cache])
        # A score is written and read again by the choice.
        moved = {"index_rows": key, "index_pairs": 2.0 * WIDE}
        self._add("index_scores", "indexer", self._read, layers, {"one": 2}, format=cache,
                  flops={"index_pairs": 2.0 * width}, bytes=moved)  # fmt: skip
        chosen = 2 * WIDE * indexer.top_k
        if self.striped:
            self._collective("index_gather", layers, "read", chosen * (self.ranks - 1) / self.ranks, {"decoding": 1})
        elif self.exchanged:
            self._collective("index_choices", layers, "sparse", chosen / 2, {"choosing": 1})

    @property
    def _read(self) -> str:
        """The segment in which contexts are read."""
        return "attn_read" if self.striped or self.exchanged else "attn_in"

    @property
    def _after(self) -> str:
        return "attn_out" if self.striped or self.exchanged else "attn_in"

    def _decode(self, layers: int) -> None:
        m = self.model
        latent, width, item = m.kv_lora_rank, m.row_width, self.item
        reading = m.num_heads if self.exchanged else self.heads
        launches = {"decoding": 2.0 if self.striped or self.exchanged else 1.0}
        self._head_product("absorb", "attn_in", layers, "absorbed", m.qk_nope_head_dim)
        if self.striped:
            self._collective("cp_queries", layers, "crossing", (m.num_heads + 1) * width * item, {"decoding": 1})
        elif self.exchanged:
            self._collective("dop_queries", layers, "crossing", m.num_heads * width * item, {"decoding": 1})
        self._add(
            "mla_decode", "decode", self._read, layers, launches, format=self.config.dtype,
            flops={"rows": 2.0 * reading * (width + latent)},
            bytes={"rows": self.row, "read": reading * (width + latent) * item},
        )  # fmt: skip
        if self.striped:
            wide = max(item, WIDE) * m.num_heads * (latent + 1)
            self._collective("cp_outputs", layers, "crossing", wide, {"decoding": 1})
            self._add("lse_merge", "elementwise", self._after, layers, {"decoding": 1},
                      bytes={"absorbed": wide * (self.ranks + 1)})  # fmt: skip
        elif self.exchanged:
            self._collective("dop_outputs", layers, "crossing", m.num_heads * latent * item, {"decoding": 1})
        self._head_product("v_up", self._after, layers, "absorbed", m.v_head_dim)

    def _head_product(self, name: str, segment: str, layers: int, rows: str, dim: int) -> None:
        """A product of each head by itself, between `dim` and the latent space."""
        latent, heads = self.model.kv_lora_rank, self.heads
        numbers = heads * dim * latent
        moved = {rows: heads * (dim + latent) * self.item, "absorbing": numbers * BYTES[self.attention]}
        flops = {rows: 2.0 * numbers}
        if self.model.indexer is not None:
            flops["sparse"], moved["sparse"] = flops[rows], moved[rows]
        self._add(name, "gemm", segment, layers, {"decoding": self.blocks}, format=self.attention,
                  flops=flops, bytes=moved)  # fmt: skip

    def _prefill(self, layers: int) -> None:
        m, item = self.model, self.item
        key = self.model.indexer.head_dim * item if self.model.indexer else 0.0
        if self.striped or self.exchanged:
            self._collective("context_rows", layers, "fetched", self.row + key, {"fetches": 1})
        up = self.heads * (m.qk_nope_head_dim + m.v_head_dim)
        launches = {"rounds": 2.0 * self.blocks + PROMPT_LAUNCHES * (self.config.run_on == "gpu")}
        self._add(
            "expand_kv", "gemm", self._after, layers, launches, format=self.attention,
            flops={"expanded": 2.0 * m.kv_lora_rank * up},
            bytes={"expanded": self.row + m.row_width * item + up * item,
                   "rounds": m.kv_lora_rank * up * BYTES[self.attention]},
        )  # fmt: skip
        self._add(
            "mla_prefill", "prefill", self._after, layers, launches, format=self.config.dtype,
            flops={"pairs": 2.0 * self.heads * (m.qk_head_dim + m.v_head_dim)},
            bytes={"context": up * item, "prefill": self.heads * (m.qk_head_dim + 2 * m.v_head_dim) * item},
        )  # fmt: skip
        if m.indexer is not None:
            both = m.row_width + m.kv_lora_rank
            self._add(
                "mla_sparse", "prefill", self._after, layers, {"choosing": 2}, format=self.config.dtype,
                flops={"sparse_rows": 2.0 * self.heads * both},
                bytes={"sparse_rows": self.row, "sparse": self.heads * both * item},
            )  # fmt: skip

    def _attention_out(self, layers: int) -> None:
        # One that no sum over ranks follows has nothing to overlap with.
        m, blocks = self.model, {"one": float(self.blocks + (self.blocks > 1))}
        inner = self.heads * m.v_head_dim
        self._product("o_proj", self._after, layers, self.attention, "here", inner, m.hidden_size, blocks, busy="busy")
        if not self.full:
            self._sum("o_sum", layers)

    def _mlp(self, dense: int, moe: int) -> None:
        m, layers = self.model, dense + moe
        alone = {"one": 1.0} if self.full else {}
        self._passes("mlp_norm", self._after, layers, "here", 4 * m.hidden_size, alone)
        if self.spread:
            hidden = m.hidden_size * self.item
            self._collective("mlp_gather", layers, "here", hidden * (self.ranks - 1), {"one": 1})
        if dense:
            self._gated("dense_mlp", dense, m.intermediate_size, {"one": 2})
        experts = m.experts
        if moe and experts is not None:
            self._product(
                "router", "mlp", moe, self.config.dtype, "all", m.hidden_size, experts.num_experts, {"one": 1}
            )
            inner, each = float(experts.intermediate_size), experts.top_k / self.ranks
            if self.config.experts_cut == "inside":
                inner, each = largest_share(experts.intermediate_size, self.ranks, 128), experts.top_k
            numbers = 3.0 * m.hidden_size * inner
            kept = 2 * m.hidden_size + 3 * inner
            self._add(
                "experts", "experts", "mlp", moe, {"one": 3}, format=self.weights,
                flops={"all": 2 * numbers * each}, bytes={"all": each * kept * self.item},
            )  # fmt: skip
            # By itself, so that both count: with few tokens an expert the blocks that are multiplied are half empty.
            self._add("expert_weights", "experts", "mlp", moe, bytes={"touched": numbers * BYTES[self.weights]})
            self._add(EXPERT_LOOP, "operation", "mlp", moe, {"touched": 1})
            if experts.shared_intermediate_size:
                self._gated("shared_mlp", moe, experts.shared_intermediate_size, {})
        self._sum("mlp_sum", layers)

    def _gated(self, name: str, layers: int, intermediate: int, launches: Terms) -> None:
        inner, hidden = largest_share(intermediate, self.ranks, 128), self.model.hidden_size
        numbers = 3.0 * hidden * inner
        moved = {"one": numbers * BYTES[self.weights], "all": (2 * hidden + 3 * inner) * self.item}
        self._add(name, "gemm", "mlp", layers, launches, format=self.weights, flops={"all": 2 * numbers}, bytes=moved)

    def _end(self) -> None:
        m = self.model
        vocab = largest_share(m.vocab_size, self.ranks)
        if self.spread:
            self._collective("want_gather", 1, "sampled", m.hidden_size * self.item, {"one": 1})
        self._product("head", "end", 1, self.config.dtype, "sampled", m.hidden_size, vocab, {"one": 2})
        self._add("sampler", "elementwise", "end", 1, {"one": SAMPLER_PASSES},
                  bytes={"sampled": float(vocab * SAMPLER_PASSES * WIDE)})  # fmt: skip
        told = 8.0 * SAMPLER_COLUMNS * (self.ranks - 1)
        self._collective("sampler_gather", 1, "sampled", told, {"one": 1})
