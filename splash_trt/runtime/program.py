"""The model's forward pass for one step, as a fixed sequence of kernels: from token ids to the logits of wanted
positions.

Nothing here looks at the contents of a device tensor, so a step that is padded to one of a few sizes can be captured in
a CUDA graph and replayed (graphs.py). Which kernels run is up to `Kernels`, and how ranks exchange data up to `Peers`:
with plain torch kernels and collectives the same sequence runs anywhere, in any dtype, which is how it is tested.

T_r tokens whose hidden state is on this rank, T of all ranks stacked, A absorbed ones (they come first), E = T_r - A
expanded, D hidden, H heads resident here, L latent, R rope part, W = L + R, Q query latent, N ranks.
"""

from __future__ import annotations

import torch

from splash_engines import ops
from splash_engines.kernels import Kernels
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.board import Watch
from splash_trt.layout.spec import SPECS, Residency, Tokens
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.runtime.device_step import DeviceStep, RankState
from splash_trt.runtime.latent_attention import LatentAttention
from splash_trt.runtime.peers import Peers, Unsummed
from splash_trt.runtime.side_stream import SideStream
from splash_trt.weights.shards import first_expert
from splash_trt.weights.spec import partition

URGENT_ROWS = 16
"""Up to so many rows, the shared expert's kernels get a higher priority than the routed experts', which would otherwise
occupy the whole GPU first. With more rows that costs more than it saves, as whole steps on an H200 showed."""


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
        self._attend = LatentAttention(model, layout, kernels, peers, state)
        self._first_id = partition(model.vocab_size, peers.size)[peers.rank][0]
        self._first_expert = first_expert(model, peers.rank, peers.size, config.experts_cut)
        device = state.storage.pages.device
        self._frequencies = ops.rope_frequencies(model.rope, model.qk_rope_head_dim).to(device)
        self._dtype = state.storage.pages.dtype
        self._eps = model.norm_eps
        self._side_stream = SideStream(device)

    def __call__(self, step: DeviceStep, logits: torch.Tensor | None = None) -> torch.Tensor:
        """[W, V_r]: logits of the wanted positions for this rank's part of the vocabulary, in the model's dtype; at
        the beginning of `logits` (flat) if that is given."""
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
            added = self._mlp(layer, x, step, None if simulated is None else simulated[layer])
            norm = None if layer == last else own[f"layers.{layer + 1}.attn_norm"]
            x = self._sum(added, step, hidden, norm)
        return self._head(hidden, step, logits)

    def _sum(
        self, partial: torch.Tensor | Unsummed, step: DeviceStep, hidden: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the sum over ranks of `partial` [T, D] to hidden [T_r, D]; returns the next norm of hidden, [T_r, D]."""
        counts, offsets = (step.counts, step.arrays["offsets"]) if self._spread else (None, None)
        return self._peers.sum_rows(partial, counts, offsets, hidden, norm, self._eps)

    def _rope(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        yarn = self._model.rope.yarn
        table = torch.promote_types(self._dtype, torch.float32)
        return ops.rope_tables(position, self._frequencies, yarn.attention_factor if yarn else 1.0, table)

    # The parts of a layer

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: DeviceStep,
    ) -> torch.Tensor:
        """x [T_r, D] is normed. Adds attention's output to hidden and returns the norm that the MLP reads: [T_r, D], or
        [T, D] of all ranks' tokens where tokens are spread over ranks."""
        own, p = self._own, f"layers.{layer}."
        values = self._attend.values(layer, x, cos, sin, step)
        # Not before: a buffer must be used in the next exchange between ranks, and attention has exchanges of its own.
        shape = (len(x), self._model.hidden_size)
        partial = self._peers.buffer(shape, self._dtype) if self._summed else x.new_empty(shape)
        left = self._attend.project_out(layer, values, partial, self._summed and self._peers.takes_unsummed(partial))
        if p + "o_bias" in own:
            hidden += own[p + "o_bias"]
        norm = own[p + "mlp_norm"]
        if self._summed:
            summed = self._peers.sum_rows(left or partial, None, None, hidden, norm, self._eps)
            assert summed is not None
            return summed
        x = self._peers.buffer(shape, self._dtype) if self._spread else torch.empty_like(hidden)
        self._k.add_norm(hidden, partial, norm, self._eps, x)
        if not self._spread:
            return x
        return self._peers.gather_rows(x, step.counts, step.arrays["offsets"], step.shape.stacked)

    def _ids(self, a: dict[str, torch.Tensor]) -> torch.Tensor:
        """[T] int64: the tokens' ids, where LAST_SAMPLED is replaced; arbitrary in padding."""
        sampled = self._state.last_sampled[a["id_slot"].clamp(min=0).long()]
        return torch.where(a["ids"] >= 0, a["ids"].long(), sampled)

    def _simulated_choice(self, a: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """[layers, T, k] int32: the experts of EngineConfig.simulate_routing, if it is asked for."""
        config = self._model.experts
        if not self._simulates or config is None:
            return None
        choice = ops.uniform_choice(self._model.num_layers, self._ids(a), a["stacked_position"], config).to(torch.int32)
        real = torch.arange(choice.shape[1], device=choice.device) < a["num_tokens"]
        return torch.where(real[:, None], choice, -1)

    def _mlp(
        self, layer: int, x: torch.Tensor, step: DeviceStep, simulated: torch.Tensor | None
    ) -> torch.Tensor | Unsummed:
        """x [T, D] is normed. Returns this rank's part of what is to be added to the residual: [T, D] in a buffer that
        peers can read, or parts that `sum_rows` adds up.

        simulated [T, k]: experts that replace the router's choice; the router's weights are kept.
        """
        own, p = self._own, f"layers.{layer}."
        out = self._peers.buffer((len(x), self._model.hidden_size), self._dtype)
        if self._model.layers[layer] is LayerKind.DENSE:
            return self._gated(x, own[p + "gate_up"], own[p + "down"], out)
        config = self._model.experts
        assert config is not None
        shared = None
        if config.shared_intermediate_size:
            with self._side_stream.run(urgent=len(x) <= URGENT_ROWS):
                shared = self._gated(x, own[p + "shared.gate_up"], own[p + "shared.down"], torch.empty_like(out))
        choice = torch.empty((len(x), config.top_k), dtype=torch.int32, device=x.device)
        weight = torch.empty(choice.shape, dtype=torch.promote_types(self._dtype, torch.float32), device=x.device)
        self._k.route(
            x, own[p + "router"], own.get(p + "router_bias"), config, step.arrays["num_tokens"], choice, weight
        )
        if simulated is not None:
            choice = simulated
        gate_up, down = own[p + "experts.gate_up"], own[p + "experts.down"]
        ready = self._side_stream.join if shared is not None else None
        here = (x, choice, weight, gate_up, down, self._first_expert, shared, out)
        left = self._k.grouped_experts(*here, ready=ready, defer=self._peers.takes_unsummed(out))
        return out if left is None else left

    def _gated(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, D] through a gated MLP into out [T, D]."""
        self._k.linear(self._k.gated(x, gate_up), down, out)
        return out

    def _wanted(self, hidden: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """[W, D]: the rows of hidden [T_r, D] whose logits are wanted, of all ranks, on every rank."""
        a = step.arrays
        if not self._spread:
            return hidden.index_select(0, a["want_row"])
        shared = self._peers.buffer(tuple(hidden.shape), self._dtype)
        shared.copy_(hidden)
        return self._peers.pick_rows(shared, a["want_rank"], a["want_row"])

    def _head(self, hidden: torch.Tensor, step: DeviceStep, room: torch.Tensor | None) -> torch.Tensor:
        own, wanted = self._own, self._wanted(hidden, step)
        x = torch.empty_like(wanted)
        self._k.add_norm(wanted, None, own["final_norm"], self._eps, x)
        head = own["embed" if self._model.tied_embeddings else "head"]
        shape = (len(x), len(head))
        out = x.new_empty(shape) if room is None else room[: shape[0] * shape[1]].view(shape)
        return torch.mm(x, head.t(), out=out)
