"""Latent attention (MLA) as part of a step's program: from normed hidden states to this rank's part of the output
projection's sum.

Tokens attend in one of two ways. Absorbed (decode): the query is multiplied by W_UK, and attends to the latent rows in
the cache. Expanded (prefill): keys and values are computed from the latent rows, one block of context at a time.

T_r tokens of this rank, A absorbed ones (they come first), E = T_r - A expanded, H heads resident here, L latent, R
rope part, W = L + R, Q query latent. Head-cut products run once per block of heads: own, and under FULL the others'.
"""

from __future__ import annotations

from typing import Any

import torch

from splash_engines import ops
from splash_engines.kernels import Kernels
from splash_plugins.few_rows.parts import PartSum
from splash_plugins.mla_attention.cut import Parts
from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.context_rounds import shared_rounds
from splash_trt.runtime.device_step import DeviceStep, RankState
from splash_trt.runtime.peers import Peers
from splash_trt.weights.shards import heads_of


class LatentAttention:
    """Attention under one layout."""

    def __init__(self, model: ModelConfig, layout: Layout, kernels: Kernels, peers: Peers, state: RankState) -> None:
        self._model = model
        self._layout = layout
        self._k = kernels
        self._peers = peers
        self._state = state
        self._own = state.weights.own
        self._shared = shared_rounds(layout, peers.size)
        self._heads = heads_of(model, peers.size)
        self._blocks = [state.weights.own]
        if SPECS[layout].residency is Residency.FULL and peers.size > 1:
            self._blocks.append(state.weights.others)
        self._num_heads = sum(len(block["layers.0.w_uk"]) for block in self._blocks)
        self._qkv = [_stacked(self._own, f"layers.{i}.") for i in range(model.num_layers)]
        self._dtype = state.storage.pages.dtype

    def values(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: DeviceStep
    ) -> torch.Tensor:
        """x [T_r, D] is normed. Returns attention's result for the heads on this rank, [T_r, H, v]."""
        model, a, num_absorbed = self._model, step.arrays, step.shape.absorbed
        q, rows = self._queries(layer, x, cos, sin, a)
        pages = self._state.storage.layer(layer)
        exchanged = self._layout in (Layout.CP, Layout.DOP) and self._peers.size > 1
        with_row = exchanged and self._layout is Layout.CP  # the new row travels as one more head
        shape = (num_absorbed, self._num_heads + with_row, model.row_width)
        absorbed = self._peers.buffer(shape, self._dtype) if exchanged and self._meets(step) else x.new_empty(shape)
        if num_absorbed:
            self._absorb(layer, q[:num_absorbed], cos, sin, absorbed)
        if with_row:
            absorbed[:, -1] = rows[:num_absorbed]
        values = x.new_empty((len(x), self._num_heads, model.v_head_dim))
        if not exchanged and num_absorbed:
            self._local(layer, absorbed, pages, step, values[:num_absorbed])
        elif exchanged and self._meets(step):
            latents = self._EXCHANGED[self._layout](self, absorbed, pages, step)
            self._value_up(layer, latents, values[:num_absorbed])
        if step.rounds:
            # All rows are rotated, not only those after A: A may include padding, and expanded rows may begin in it.
            self._rotate(q, cos, sin)
            self._expanded(layer, q, pages, step, values)
        return values

    def _meets(self, step: DeviceStep) -> bool:
        """Whether ranks exchange queries in this step: some rank has absorbed tokens. The same on all ranks."""
        return any(step.absorbed_counts) or step.shape.absorbed > 0

    def _queries(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, a: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q [T_r, H, nope + R], not rotated yet, and the tokens' cache rows [T_r, W], which are also written to
        the cache."""
        model, own, p = self._model, self._own, f"layers.{layer}."
        query = model.q_lora_rank or 0
        qkv = self._project_in(layer, x)
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
            self._k.linear(source, w, q.flatten(1)[:, first : first + len(w)])
            first += len(w)
        return q, rows

    def _project_in(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [T_r, D] through q_a and kv_a: [T_r, Q + W]."""
        own, p, query = self._own, f"layers.{layer}.", self._model.q_lora_rank or 0
        both = self._qkv[layer]
        if both is not None:
            out = self._k.project_in(x, both)
        else:
            out = x.new_empty((len(x), query + self._model.row_width))
            if query:
                self._k.linear(x, own[p + "q_a"], out[:, :query])
            self._k.linear(x, own[p + "kv_a"], out[:, query:])
        for name, part in (("q_a_bias", out[:, :query]), ("kv_a_bias", out[:, query:])):
            if p + name in own:
                part += own[p + name]
        return out

    def _absorb(self, layer: int, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        """q [A, H, nope + R], not rotated, into out [A, H or more, W]."""
        first, interleaved = 0, self._model.rope.interleaved
        for block in self._blocks:
            w_uk = block[f"layers.{layer}.w_uk"]
            heads = slice(first, first + len(w_uk))
            self._k.absorb(q[:, heads], cos[: len(q)], sin[: len(q)], interleaved, w_uk, out[:, heads])
            first += len(w_uk)

    def _rotate(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """q [T_r, H, nope + R] in place."""
        self._k.rope_q(q, cos, sin, self._model.rope.interleaved, self._model.qk_nope_head_dim, None)

    def _local(
        self, layer: int, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep, out: torch.Tensor
    ) -> None:
        """TP and DP: the whole context is in this rank's pages. absorbed [A, H, W] to values in out [A, H, v]."""
        w_uv = [block[f"layers.{layer}.w_uv"] for block in self._blocks]
        self._k.decode_values(absorbed, pages, *self._reads(step), w_uv, out)

    def _value_up(self, layer: int, latents: torch.Tensor, out: torch.Tensor) -> None:
        """latents [A, H, L] through W_UV into out [A, H, v]."""
        first = 0
        for block in self._blocks:
            w_uv = block[f"layers.{layer}.w_uv"]
            heads = slice(first, first + len(w_uv))
            self._k.value_up(latents[:, heads], w_uv, out[:, heads])
            first += len(w_uv)

    def _reads(self, step: DeviceStep) -> tuple[Any, ...]:
        """The arguments of the decode kernels that say where contexts lie: from block tables to the scale of scores."""
        a = step.arrays
        stride = self._peers.size if self._layout is Layout.CP else 1
        index = (self._state.tables, a["read_slot"], a["read_first"], a["read_length"])
        parts = Parts(part=a["part"], read_part=a["read_part"], merged=a["merged"])
        return *index, parts, stride, self._model.kv_lora_rank, self._model.softmax_scale

    def _at_owner(self, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """DOP: every rank has all tokens, but only its own heads' queries. They go to the owner of the context, which
        attends with all heads, and results go back to the heads' ranks."""
        a = step.arrays
        q = self._peers.to_owners(absorbed, a["owned"], self._heads)
        out = self._peers.buffer((*q.shape[:2], self._model.kv_lora_rank), self._dtype)
        self._k.decode(q, pages, *self._reads(step), out, None)
        return self._peers.to_heads(out, a["owner"], a["owner_place"], self._heads)

    def _by_stripes(self, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """CP: every rank has all queries and attends to its stripe of the context; home ranks merge the results."""
        a, heads = step.arrays, self._num_heads
        offsets, counts = a["absorbed_offsets"], step.absorbed_counts
        packed = self._peers.gather_rows(absorbed, counts, offsets, step.shape.reads)
        self._k.append(pages, packed[:, heads], a["stripe_page"], a["stripe_offset"])
        out = self._peers.buffer((len(packed), heads, self._model.kv_lora_rank), self._dtype)
        wide = torch.promote_types(self._dtype, torch.float32)
        lse = self._peers.buffer((len(packed), heads), wide)
        self._k.decode(packed[:, :heads], pages, *self._reads(step), out, lse)
        return self._peers.merge_parts(out, lse, counts, offsets, step.shape.absorbed)

    _EXCHANGED = {Layout.DOP: _at_owner, Layout.CP: _by_stripes}

    def _expanded(self, layer: int, q: torch.Tensor, pages: torch.Tensor, step: DeviceStep, out: torch.Tensor) -> None:
        """Expanded attention of q [T_r, H, nope + R], rotated, into the expanded tokens' rows of out [T_r, H, v]."""
        model, position = self._model, step.arrays["position"]
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
            for first, keys, v in self._expand(layer, rows[:, : model.kv_lora_rank]):
                heads = slice(first, first + keys.shape[1])
                self._k.prefill(
                    q[:, heads],
                    position,
                    rows,
                    keys,
                    v,
                    part.segments,
                    part.tiles,
                    model.softmax_scale,
                    sums[:, heads],
                    None if lse is None else lse[:, heads],
                    merges,
                )
        if merges:
            out[step.shape.absorbed :] = sums[step.shape.absorbed :]

    def _expand(self, layer: int, latents: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Keys and values of latents [C, L]: for each block of heads (first head, k_nope [C, h, nope], v [C, h, v]).
        They lie in the workspace and are overwritten by the next call."""
        out, first, used = [], 0, 0
        for block in self._blocks:
            pair = []
            for name in ("w_uk", "w_uv"):
                w = block[f"layers.{layer}.{name}"]
                size = len(latents) * w.shape[0] * w.shape[1]
                view = self._state.expanded[used : used + size].view(len(latents), *w.shape[:2])
                ops.expand(latents, w, view)
                used += size
                pair.append(view)
            out.append((first, pair[0], pair[1]))
            first += pair[0].shape[1]
        return out

    def project_out(self, layer: int, values: torch.Tensor, out: torch.Tensor, defer: bool) -> PartSum | None:
        """values [T_r, H, v] through the output projection into out [T_r, D]. With `defer`, the kernel may instead
        return the result in parts that the peers' sum_rows adds up; else returns None."""
        if defer:
            own = self._own[f"layers.{layer}.o"].flatten(0, 1)
            left = self._k.linear_parts(values.flatten(1), own.t())
            if left is not None:
                return left
        first = 0
        for block in self._blocks:
            o = block[f"layers.{layer}.o"]
            x = values[:, first : first + len(o)].flatten(1)
            if first == 0:
                self._k.linear(x, o.flatten(0, 1).t(), out)
            else:
                out.addmm_(x, o.flatten(0, 1))
            first += len(o)
        return None


def _stacked(own: dict[str, torch.Tensor], prefix: str) -> torch.Tensor | None:
    """A view of q_a and kv_a as one matrix [Q + W, D]; None if they do not lie one right after the other."""
    kv_a, q_a = own[prefix + "kv_a"], own.get(prefix + "q_a")
    if q_a is None:
        return kv_a
    gap = kv_a.data_ptr() - q_a.data_ptr()
    if gap != q_a.nbytes:
        return None
    return q_a.as_strided((len(q_a) + len(kv_a), q_a.shape[1]), (q_a.shape[1], 1))
