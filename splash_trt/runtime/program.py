"""One step of the model as a fixed sequence of kernels: from ids to the logits of wanted positions.

Nothing here looks at the contents of a device tensor, so a step whose sizes are padded to a bucket can be captured in a
CUDA graph and replayed (graphs.py). Which kernels run is the `Kernels` table's affair, how ranks meet that of `Peers`:
with plain torch kernels and collectives the same sequence runs anywhere, in any dtype, which is how it is tested.

T_r tokens whose hidden state is on this rank, T of all ranks stacked, A absorbed ones (they come first), E = T_r - A
expanded, D hidden, H heads resident here, L latent, R rope part, W = L + R, Q query latent, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splash_engines import ops
from splash_engines.kernels import Kernels
from splash_trt.cache.storage import PageStorage
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.board import Watch
from splash_trt.layout.spec import SPECS, Residency, Tokens
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.runtime.context_rounds import shared_rounds
from splash_trt.runtime.peers import Peers
from splash_trt.runtime.step_arrays import Shape
from splash_trt.weights.shards import cut_ranges, heads_of
from splash_trt.weights.spec import partition, tensor_specs
from splash_trt.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class DeviceRound:
    """A Round's arrays on the device, int32. tiles: as plugins/mla_attention/tiles.py makes them of the segments."""

    num_rows: int
    holder: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    segments: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """StepArrays on the device."""

    shape: Shape
    arrays: dict[str, torch.Tensor]
    counts: tuple[int, ...]
    absorbed_counts: tuple[int, ...]
    rounds: tuple[DeviceRound, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What a program works on besides a step's arrays; addresses never change."""

    weights: WeightStore
    storage: PageStorage
    tables: torch.Tensor
    """[slots, pages] int32: this rank's block tables."""
    last_sampled: torch.Tensor
    """[slots + 1] int64; the last one is for padding."""
    context: torch.Tensor
    """[context_block_tokens, W] workspace."""
    expanded: torch.Tensor
    """Flat workspace: keys and values of a context block, for all heads."""


class Program:
    """The model under one layout."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        layout: Layout,
        kernels: Kernels,
        peers: Peers,
        state: RankState,
        watch: Watch,
    ) -> None:
        self._model = model
        self._layout = layout
        self._simulates = bool(config.simulate_routing)
        self._k = kernels
        self._peers = peers
        self._state = state
        self._watch = watch
        self._own = state.weights.own
        spec = SPECS[layout]
        many = peers.size > 1
        self._spread = spec.tokens is Tokens.SPREAD and many
        self._summed = spec.residency is Residency.SHARD and many
        self._shared = shared_rounds(layout, peers.size)
        self._heads = heads_of(model, peers.size)
        self._blocks = [state.weights.own]
        if spec.residency is Residency.FULL and many:
            self._blocks.append(state.weights.others)
        self._num_heads = sum(len(block["layers.0.w_uk"]) for block in self._blocks)
        self._first_id = partition(model.vocab_size, peers.size)[peers.rank][0]
        self._first_expert = _first_expert(model, peers.rank, peers.size)
        self._qkv = [_stacked(self._own, f"layers.{i}.") for i in range(model.num_layers)]
        device = state.storage.pages.device
        self._frequencies = ops.rope_frequencies(model.rope, model.qk_rope_head_dim).to(device)
        self._dtype = state.storage.pages.dtype
        self._eps = model.norm_eps

    def __call__(self, step: DeviceStep) -> torch.Tensor:
        """[W, V_r] logits of this rank's part of the vocabulary, in the model's dtype."""
        own, a = self._own, step.arrays
        self._peers.begin()
        rows, hidden_size = step.shape.rows, self._model.hidden_size
        partial = self._peers.buffer((step.shape.stacked, hidden_size), self._dtype)
        self._k.embed(a["ids"], a["id_slot"], self._state.last_sampled, own["embed"], self._first_id, partial)
        hidden = torch.zeros((rows, hidden_size), dtype=self._dtype, device=partial.device)
        x = self._sum(partial, step, hidden, own["layers.0.attn_norm"])
        simulated = self._simulated_choice(a)
        cos, sin = self._rope(a["position"])
        last = self._model.num_layers - 1
        for layer in range(self._model.num_layers):
            self._watch.layer(layer)
            assert x is not None
            x = self._attention(layer, x, hidden, cos, sin, step)
            partial = self._mlp(layer, x, step, None if simulated is None else simulated[layer])
            norm = None if layer == last else own[f"layers.{layer + 1}.attn_norm"]
            x = self._sum(partial, step, hidden, norm)
        return self._head(hidden, step)

    # Meetings of the ranks

    def _sum(
        self, partial: torch.Tensor, step: DeviceStep, hidden: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add what all ranks have of `partial` [T, D] to hidden [T_r, D]; the next norm of it, [T_r, D]."""
        counts, offsets = (step.counts, step.arrays["offsets"]) if self._spread else (None, None)
        return self._peers.sum_rows(partial, counts, offsets, hidden, norm, self._eps)

    def _rope(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        yarn = self._model.rope.yarn
        table = torch.promote_types(self._dtype, torch.float32)
        return ops.rope_tables(position, self._frequencies, yarn.attention_factor if yarn else 1.0, table)

    # Attention

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: DeviceStep,
    ) -> torch.Tensor:
        """x [T_r, D] normed; adds attention's output to hidden and returns the norm before the MLP: [T_r, D], or [T, D]
        of all ranks' tokens where they are spread."""
        model, a, num_absorbed = self._model, step.arrays, step.shape.absorbed
        q, rows = self._queries(layer, x, cos, sin, a)
        pages = self._state.storage.layer(layer)
        exchanged = self._layout in (Layout.CP, Layout.DOP) and self._peers.size > 1
        with_row = exchanged and self._layout is Layout.CP  # the new row travels as one more head
        shape = (num_absorbed, self._num_heads + with_row, model.row_width)
        absorbed = self._peers.buffer(shape, self._dtype) if exchanged and self._meets(step) else x.new_empty(shape)
        self._k.rope_q(q, cos, sin, model.rope.interleaved, model.qk_nope_head_dim, absorbed[:, : self._num_heads])
        if with_row:
            absorbed[:, -1] = rows[:num_absorbed]
        self._absorb(layer, q[:num_absorbed], absorbed)
        values = x.new_empty((len(x), self._num_heads, model.v_head_dim))
        if self._meets(step):
            latents = self._ABSORBED[self._layout if exchanged else Layout.TP](self, absorbed, pages, step)
            self._v_up(layer, latents, values[:num_absorbed])
        if step.rounds:
            self._expanded(layer, q[num_absorbed:], pages, step, values[num_absorbed:])
        return self._attention_out(layer, values, hidden, step)

    def _meets(self, step: DeviceStep) -> bool:
        """Some rank has absorbed tokens; all know."""
        return any(step.absorbed_counts) or step.shape.absorbed > 0

    def _queries(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, a: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T_r, H, nope + R], not rotated yet, and the tokens' cache rows [T_r, W], stored where they belong."""
        model, own, p = self._model, self._own, f"layers.{layer}."
        query = model.q_lora_rank or 0
        qkv = x.new_empty((len(x), query + model.row_width))
        self._project_in(layer, x, qkv)
        latent = x.new_empty((len(x), query)) if query else None
        rows = x.new_empty((len(x), model.row_width))
        self._k.latent_rows(
            qkv,
            own[p + "q_a_norm"] if query else None,
            own[p + "kv_a_norm"],
            model.latent_norm_eps,
            cos,
            sin,
            model.rope.interleaved,
            latent,
            rows,
            self._state.storage.layer(layer),
            a["page"],
            a["offset"],
            a["target_page"],
            a["offset"],
        )
        source = x if latent is None else latent
        q = x.new_empty((len(x), self._num_heads, model.qk_head_dim))
        first = 0
        for block in self._blocks:
            w = block[p + "q_b"].flatten(0, 1)
            torch.mm(source, w.t(), out=q.flatten(1)[:, first : first + len(w)])
            first += len(w)
        return q, rows

    def _project_in(self, layer: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T_r, D] through q_a and kv_a: [T_r, Q + W]."""
        own, p, query = self._own, f"layers.{layer}.", self._model.q_lora_rank or 0
        if self._qkv[layer] is not None:
            torch.mm(x, self._qkv[layer].t(), out=out)
        else:
            if query:
                torch.mm(x, own[p + "q_a"].t(), out=out[:, :query])
            torch.mm(x, own[p + "kv_a"].t(), out=out[:, query:])
        for name, part in (("q_a_bias", out[:, :query]), ("kv_a_bias", out[:, query:])):
            if p + name in own:
                part += own[p + name]

    def _absorb(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """q [A, H, nope + R] against W_UK into out[..., :L]."""
        nope, first = self._model.qk_nope_head_dim, 0
        for block in self._blocks:
            w_uk = block[f"layers.{layer}.w_uk"]
            heads = slice(first, first + len(w_uk))
            target = out[:, heads, : self._model.kv_lora_rank].transpose(0, 1)
            torch.bmm(q[:, heads, :nope].transpose(0, 1), w_uk, out=target)
            first += len(w_uk)

    def _v_up(self, layer: int, latents: torch.Tensor, out: torch.Tensor) -> None:
        """latents [A, H, L] through W_UV into out [A, H, v]."""
        first = 0
        for block in self._blocks:
            w_uv = block[f"layers.{layer}.w_uv"]
            heads = slice(first, first + len(w_uv))
            torch.bmm(latents[:, heads].transpose(0, 1), w_uv.transpose(1, 2), out=out[:, heads].transpose(0, 1))
            first += len(w_uv)

    def _decode(
        self, q: torch.Tensor, pages: torch.Tensor, step: DeviceStep, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        a = step.arrays
        stride = self._peers.size if self._layout is Layout.CP else 1
        self._k.decode(
            q,
            pages,
            self._state.tables,
            a["read_slot"],
            a["read_first"],
            a["read_length"],
            stride,
            self._model.kv_lora_rank,
            self._model.softmax_scale,
            out,
            lse,
        )

    def _local(self, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """TP and DP: the whole context is in this rank's pages. Returns [A, H, L]."""
        out = absorbed.new_empty((*absorbed.shape[:2], self._model.kv_lora_rank))
        self._decode(absorbed, pages, step, out, None)
        return out

    def _at_owner(self, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """DOP: every rank has all tokens but only its heads; owners have the rows and attend with all heads."""
        a = step.arrays
        q = self._peers.to_owners(absorbed, a["owned"], self._heads)
        out = self._peers.buffer((*q.shape[:2], self._model.kv_lora_rank), self._dtype)
        self._decode(q, pages, step, out, None)
        return self._peers.to_heads(out, a["owner"], a["owner_place"], self._heads)

    def _by_stripes(self, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """CP: each rank attends to its stripe of the context for the queries of all; the home rank merges."""
        a, heads = step.arrays, self._num_heads
        offsets, counts = a["absorbed_offsets"], step.absorbed_counts
        packed = self._peers.gather_rows(absorbed, counts, offsets, step.shape.reads)
        self._k.append(pages, packed[:, heads], a["stripe_page"], a["stripe_offset"])
        out = self._peers.buffer((len(packed), heads, self._model.kv_lora_rank), self._dtype)
        wide = torch.promote_types(self._dtype, torch.float32)
        lse = self._peers.buffer((len(packed), heads), wide)
        self._decode(packed[:, :heads], pages, step, out, lse)
        return self._peers.merge_parts(out, lse, counts, offsets, step.shape.absorbed)

    _ABSORBED = {Layout.TP: _local, Layout.DP: _local, Layout.DOP: _at_owner, Layout.CP: _by_stripes}

    def _expanded(self, layer: int, q: torch.Tensor, pages: torch.Tensor, step: DeviceStep, out: torch.Tensor) -> None:
        """q [E, H, nope + R] rotated, against up-projected context, into out [E, H, v]."""
        model, position = self._model, step.arrays["position"][step.shape.absorbed :]
        merges = len(step.rounds) > 1
        wide = torch.promote_types(self._dtype, torch.float32)
        sums = torch.zeros_like(out, dtype=wide) if merges else out
        lse = torch.full(out.shape[:2], -torch.inf, dtype=wide, device=out.device) if merges else None
        for part in step.rounds:
            rows = self._state.context[: part.num_rows]
            if self._shared:
                self._peers.context_rows(pages, part.holder, part.page, part.offset, rows)
            else:
                self._k.gather(pages, part.page, part.offset, rows)
            if not len(q):
                continue
            first, used = 0, 0
            for block in self._blocks:
                pair = []
                for name in ("w_uk", "w_uv"):
                    w = block[f"layers.{layer}.{name}"]
                    size = part.num_rows * w.shape[0] * w.shape[1]
                    view = self._state.expanded[used : used + size].view(part.num_rows, *w.shape[:2])
                    ops.expand(rows[:, : model.kv_lora_rank], w, view)
                    used += size
                    pair.append(view)
                heads = slice(first, first + pair[0].shape[1])
                self._k.prefill(
                    q[:, heads],
                    position,
                    rows,
                    pair[0],
                    pair[1],
                    part.segments,
                    part.tiles,
                    model.softmax_scale,
                    sums[:, heads],
                    None if lse is None else lse[:, heads],
                    merges,
                )
                first += pair[0].shape[1]
        if merges:
            out.copy_(sums)

    def _attention_out(self, layer: int, values: torch.Tensor, hidden: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """values [T_r, H, v] through the output projection onto hidden; what the MLP reads."""
        own, p = self._own, f"layers.{layer}."
        shape = (len(values), self._model.hidden_size)
        partial = self._peers.buffer(shape, self._dtype) if self._summed else values.new_empty(shape)
        first = 0
        for block in self._blocks:
            o = block[p + "o"]
            x = values[:, first : first + len(o)].flatten(1)
            if first == 0:
                torch.mm(x, o.flatten(0, 1), out=partial)
            else:
                partial.addmm_(x, o.flatten(0, 1))
            first += len(o)
        if p + "o_bias" in own:
            hidden += own[p + "o_bias"]
        norm = own[p + "mlp_norm"]
        if self._summed:
            x = self._peers.sum_rows(partial, None, None, hidden, norm, self._eps)
            assert x is not None
            return x
        x = self._peers.buffer(shape, self._dtype) if self._spread else torch.empty_like(hidden)
        self._k.add_norm(hidden, partial, norm, self._eps, x)
        if not self._spread:
            return x
        return self._peers.gather_rows(x, step.counts, step.arrays["offsets"], step.shape.stacked)

    # MLP and head

    def _simulated_choice(self, a: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """[layers, T, k] int32: the experts of EngineConfig.simulate_routing, if it is asked for."""
        config = self._model.experts
        if not self._simulates or config is None:
            return None
        sampled = self._state.last_sampled[a["id_slot"].clamp(min=0).long()]
        token = torch.where(a["ids"] >= 0, a["ids"].long(), sampled)
        choice = ops.uniform_choice(self._model.num_layers, token, a["stacked_position"], config).to(torch.int32)
        real = torch.arange(choice.shape[1], device=choice.device) < a["num_tokens"]
        return torch.where(real[:, None], choice, -1)

    def _mlp(self, layer: int, x: torch.Tensor, step: DeviceStep, simulated: torch.Tensor | None) -> torch.Tensor:
        """x [T, D] normed; this rank's part of what is added to the residual, [T, D], where peers can read it.

        simulated [T, k]: experts in place of the router's, with the router's weights.
        """
        own, p = self._own, f"layers.{layer}."
        out = self._peers.buffer((len(x), self._model.hidden_size), self._dtype)
        if self._model.layers[layer] is LayerKind.DENSE:
            return self._gated(x, own[p + "gate_up"], own[p + "down"], out)
        config = self._model.experts
        assert config is not None
        choice = torch.empty((len(x), config.top_k), dtype=torch.int32, device=x.device)
        weight = torch.empty(choice.shape, dtype=torch.promote_types(self._dtype, torch.float32), device=x.device)
        self._k.route(
            x, own[p + "router"], own.get(p + "router_bias"), config, step.arrays["num_tokens"], choice, weight
        )
        if simulated is not None:
            choice = simulated
        shared = None
        if config.shared_intermediate_size:
            shared = self._gated(x, own[p + "shared.gate_up"], own[p + "shared.down"], torch.empty_like(out))
        gate_up, down = own[p + "experts.gate_up"], own[p + "experts.down"]
        self._k.grouped_experts(x, choice, weight, gate_up, down, self._first_expert, shared, out)
        return out

    def _gated(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, D] through a gated MLP into out [T, D]."""
        inner = self._k.silu_mul(torch.mm(x, gate_up.flatten(0, 1).t()))
        return torch.mm(inner, down.t(), out=out)

    def _head(self, hidden: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        a, own = step.arrays, self._own
        if self._spread:
            shared = self._peers.buffer(tuple(hidden.shape), self._dtype)
            shared.copy_(hidden)
            wanted = self._peers.pick_rows(shared, a["want_rank"], a["want_row"])
        else:
            wanted = hidden.index_select(0, a["want_row"])
        x = torch.empty_like(wanted)
        self._k.add_norm(wanted, None, own["final_norm"], self._eps, x)
        return torch.mm(x, own["embed" if self._model.tied_embeddings else "head"].t())


def _first_expert(model: ModelConfig, rank: int, size: int) -> int:
    name = next((f"layers.{i}.experts.gate_up" for i, k in enumerate(model.layers) if k is LayerKind.MOE), None)
    if name is None:
        return 0
    spec = next(s for s in tensor_specs(model) if s.name == name)
    return cut_ranges(spec, size)[rank][0]


def _stacked(own: dict[str, torch.Tensor], prefix: str) -> torch.Tensor | None:
    """q_a and kv_a as one matrix [Q + W, D], where they lie one right after the other; a view."""
    kv_a, q_a = own[prefix + "kv_a"], own.get(prefix + "q_a")
    if q_a is None:
        return kv_a
    gap = kv_a.data_ptr() - q_a.data_ptr()
    if gap != q_a.nbytes:
        return None
    return q_a.as_strided((len(q_a) + len(kv_a), q_a.shape[1]), (q_a.shape[1], 1))
