"""The dense parts of a step in plain torch, cut as networks are: the truth for splash_engines.tensorrt.

The same calls as NetworkEngine; a step's program itself is cut otherwise (runtime/program.py).

T_r tokens whose hidden state this rank holds, T tokens in all, D hidden, H heads resident here (SHARD: the rank's;
FULL: own, then the others' in rank order), W = L + R. Head-cut products run once per block of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from splash_engines import ops
from splash_plugins.grouped_experts.reference import grouped_experts
from splash_trt.dist.collectives import Collectives
from splash_trt.layout.spec import LayoutSpec, Residency, Tokens
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.shards import first_expert
from splash_trt.weights.spec import partition
from splash_trt.weights.store import WeightStore


class TorchSegments:
    """The model's segments under one layout; `counts` [N] in the calls are the plan's."""

    def __init__(
        self, model: ModelConfig, spec: LayoutSpec, weights: WeightStore, collectives: Collectives
    ) -> None:
        self.model = model
        self.spec = spec
        self._own = weights.own
        self._blocks = [weights.own]
        if spec.residency is Residency.FULL and collectives.size > 1:
            self._blocks.append(weights.others)
        self._comm = collectives
        rank, size = collectives.rank, collectives.size
        self._first_id = partition(model.vocab_size, size)[rank][0]
        self._first_expert = first_expert(model, rank, size)

    def embed(self, ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """ids [T] of all tokens, rank after rank where they are spread; returns hidden [T_r, D]."""
        partial = ops.embed(ids, self._own["embed"], self._first_id)
        return self._sum(partial, counts)

    def attention_in(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T_r, D] not normed; returns q_nope [T_r, H, nope], q_rope [T_r, H, R] rotated, cache rows [T_r, W]."""
        model, own, p = self.model, self._own, f"layers.{layer}."
        x = latent = ops.rms_norm(x, own[p + "attn_norm"], model.norm_eps)
        if model.q_lora_rank:
            latent = F.linear(x, own[p + "q_a"], own.get(p + "q_a_bias"))
            latent = ops.rms_norm(latent, own[p + "q_a_norm"], model.latent_norm_eps)
        blocks = [block[p + "q_b"] for block in self._blocks]
        q = torch.cat([F.linear(latent, b.flatten(0, 1)).view(len(x), *b.shape[:2]) for b in blocks], dim=1)
        q_nope, q_rope = q.split([model.qk_nope_head_dim, model.qk_rope_head_dim], dim=-1)
        row = F.linear(x, own[p + "kv_a"], own.get(p + "kv_a_bias"))
        kv, k_rope = row.split([model.kv_lora_rank, model.qk_rope_head_dim], dim=-1)
        kv = ops.rms_norm(kv, own[p + "kv_a_norm"], model.latent_norm_eps)
        interleaved = model.rope.interleaved
        rows = torch.cat([kv, ops.apply_rope(k_rope, cos, sin, interleaved)], dim=-1)
        return q_nope, ops.apply_rope(q_rope, cos, sin, interleaved), rows

    def absorb(self, layer: int, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """[n, H, nope] and [n, H, R] to absorbed queries [n, H, W]."""
        parts, first = [], 0
        for block in self._blocks:
            w_uk = block[f"layers.{layer}.w_uk"]
            parts.append(ops.absorb(q_nope[:, first : first + len(w_uk)], w_uk))
            first += len(w_uk)
        return torch.cat([torch.cat(parts, dim=1), q_rope], dim=-1)

    def v_up(self, layer: int, latents: torch.Tensor) -> torch.Tensor:
        """[n, H, L] to [n, H, v]."""
        parts, first = [], 0
        for block in self._blocks:
            w_uv = block[f"layers.{layer}.w_uv"]
            parts.append(ops.v_up(latents[:, first : first + len(w_uv)].to(w_uv.dtype), w_uv))
            first += len(w_uv)
        return torch.cat(parts, dim=1)

    def expand_kv(
        self, layer: int, latents: torch.Tensor, workspace: torch.Tensor
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """latents [C, L] to, per block of heads, (first head, k_nope [C, h, nope], v [C, h, v]) in the workspace.

        workspace: a flat tensor of at least C * H * (nope + v) numbers; the result is dead at the next call.
        """
        out, first, used = [], 0, 0
        for block in self._blocks:
            pair = []
            for name in ("w_uk", "w_uv"):
                w = block[f"layers.{layer}.{name}"]
                size = len(latents) * w.shape[0] * w.shape[1]
                view = workspace[used : used + size].view(len(latents), w.shape[0], w.shape[1])
                ops.expand(latents, w, view)
                used += size
                pair.append(view)
            out.append((first, pair[0], pair[1]))
            first += pair[0].shape[1]
        return out

    def attention_out(self, layer: int, values: torch.Tensor) -> torch.Tensor:
        """values [T_r, H, v] through the output projection; returns [T_r, D] summed over all heads."""
        p, first, partial = f"layers.{layer}.", 0, None
        for block in self._blocks:
            o = block[p + "o"]
            x = values[:, first : first + len(o)].flatten(1)
            partial = x @ o.flatten(0, 1) if partial is None else partial.addmm_(x, o.flatten(0, 1))
            first += len(o)
        assert partial is not None
        if self.spec.residency is Residency.SHARD:
            partial = self._comm.all_reduce(partial)
        bias = self._own.get(p + "o_bias")
        return partial if bias is None else partial + bias

    def mlp(self, layer: int, hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """hidden [T_r, D] through norm and MLP or experts; returns what is added to the residual, [T_r, D]."""
        p = f"layers.{layer}."
        x = ops.rms_norm(hidden, self._own[p + "mlp_norm"], self.model.norm_eps)
        if self.spec.tokens is Tokens.SPREAD:
            x = self._comm.all_gather(x, counts)
        if self.model.layers[layer] is LayerKind.DENSE:
            return self._sum(ops.gated_mlp(x, self._own[p + "gate_up"], self._own[p + "down"]), counts)
        return self._sum(self._moe(layer, x), counts)

    def _moe(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        own, config, p = self._own, self.model.experts, f"layers.{layer}."
        assert config is not None
        choice, weight = ops.route(x, own[p + "router"], own.get(p + "router_bias"), config)
        gate_up, down = own[p + "experts.gate_up"], own[p + "experts.down"]
        partial = grouped_experts(x, choice, weight, gate_up, down, self._first_expert)
        if config.shared_intermediate_size:
            partial += ops.gated_mlp(x, own[p + "shared.gate_up"], own[p + "shared.down"])
        return partial

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [W, D] of the wanted positions, the same on all ranks; returns this rank's logits [W, V_r]."""
        x = ops.rms_norm(hidden, self._own["final_norm"], self.model.norm_eps)
        table = self._own["embed" if self.model.tied_embeddings else "head"]
        return ops.wide(F.linear(x, table))

    def _sum(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Sum [T, D] over ranks; a rank keeps its own tokens' part where tokens are spread."""
        if self.spec.tokens is Tokens.SPREAD:
            return self._comm.reduce_scatter(partial, counts)
        return self._comm.all_reduce(partial)
