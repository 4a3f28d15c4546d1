"""The dense parts of a step as calls of networks: binds their weights and sums or gathers between them.

splash_trt.runtime.network_program makes a step of these calls. An Executor executes a network: TensorRT's runtime on a
GPU, an evaluator in tests.

T_r tokens whose hidden states this rank holds, T tokens in all, D hidden, H heads resident on this rank (SHARD: own;
FULL: own, then the others' in rank order), W = L + R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from splash_plugins.grouped_experts.reference import grouped_experts
from splash_trt.dist.collectives import Collectives
from splash_trt.layout.spec import LayoutSpec, Residency, Tokens
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.shards import first_expert
from splash_trt.weights.spec import partition
from splash_trt.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A network's inputs and outputs. outputs: each one's shape, with -1 for what varies, and dtype."""

    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Executor(Protocol):
    """The networks of one rank under one layout."""

    def signature(self, kind: str) -> Signature | None:
        """A segment's signature; None if this rank has no such network: it has nothing to compute in it, or the segment
        has its other form (moe, moe_in)."""
        ...

    def run(
        self, kind: str, layer: int | None, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Computes `outputs` in place. All tensors are contiguous. The weights of a kind and layer are always at the
        same addresses."""
        ...


class NetworkEngine:
    """The model's segments under one layout. `counts` [N] in calls: the plan's numbers of tokens of each rank."""

    def __init__(
        self, model: ModelConfig, spec: LayoutSpec, weights: WeightStore, collectives: Collectives, executor: Executor
    ) -> None:
        assert model.indexer is None, "refused before any rank starts"
        self.model = model
        self.spec = spec
        self._blocks = {"own": weights.own, "others": weights.others}
        self._comm = collectives
        self._executor = executor
        self._bound: dict[tuple[str, int | None], dict[str, torch.Tensor]] = {}
        self._like = weights.own["final_norm"]
        rank, size = collectives.rank, collectives.size
        self._first_id = self._number(partition(model.vocab_size, size)[rank][0])
        self._first_local = first_expert(model, rank, size)
        self._first_expert = self._number(self._first_local)

    def embed(self, ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """ids [T] of all tokens, rank by rank where they are spread; returns hidden [T_r, D]."""
        inputs = {"ids": ids.to(torch.int32), "first_id": self._first_id}
        return self._summed(self._run("embed", None, len(ids), inputs), len(ids), counts)

    def attention_in(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T_r, D] not normed; returns q_nope [T_r, H, nope], q_rope [T_r, H, R] rotated, cache rows [T_r, W]."""
        found = self._run("attention_in", layer, len(x), {"hidden": x, "cos": cos, "sin": sin})
        if "q_nope" not in found:  # more ranks than heads
            model = self.model
            empty = (x.new_empty((len(x), 0, n)) for n in (model.qk_nope_head_dim, model.qk_rope_head_dim))
            return *empty, found["rows"]  # type: ignore[return-value]
        return found["q_nope"], found["q_rope"], found["rows"]

    def absorb(self, layer: int, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """q_nope [n, H, nope] and q_rope [n, H, R] to absorbed queries [n, H, W]."""
        found = self._run("absorb", layer, len(q_nope), {"q_nope": q_nope, "q_rope": q_rope})
        return found["q"] if found else q_nope.new_empty((len(q_nope), 0, self.model.row_width))

    def v_up(self, layer: int, latents: torch.Tensor) -> torch.Tensor:
        """latents [n, H, L] to values [n, H, v]."""
        wide = latents.to(torch.promote_types(latents.dtype, torch.float32))
        found = self._run("v_up", layer, len(latents), {"latents": wide})
        if found:
            return found["values"]
        return self._like.new_empty((len(latents), 0, self.model.v_head_dim))

    def expand_kv(
        self, layer: int, latents: torch.Tensor, workspace: torch.Tensor
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Keys and values of latents [C, L]: for each block of heads (first head, k_nope [C, h, nope], v [C, h, v]).

        workspace: a flat tensor of at least C * H * (nope + v) numbers, which holds the result until the next call.
        """
        signature = self._executor.signature("expand_kv")
        if signature is None:
            return []
        outputs, used = {}, 0
        for name, (shape, _) in signature.outputs.items():
            size = len(latents) * shape[1] * shape[2]
            outputs[name] = workspace[used : used + size].view(len(latents), *shape[1:])
            used += size
        self._run("expand_kv", layer, len(latents), {"latents": latents}, outputs)
        out, first = [], 0
        for block in self._blocks:
            if f"v.{block}" in outputs:
                out.append((first, outputs[f"k_nope.{block}"], outputs[f"v.{block}"]))
                first += outputs[f"v.{block}"].shape[1]
        return out

    def attention_out(self, layer: int, values: torch.Tensor) -> torch.Tensor:
        """values [T_r, H, v] through the output projection; returns [T_r, D] summed over all heads."""
        found = self._run("attention_out", layer, len(values), {"values": values})
        if "out" in found or "sum" in found:
            return found["out"] if "out" in found else found["sum"]
        partial = found.get("partial", values.new_zeros((len(values), self.model.hidden_size)))
        if self.spec.residency is Residency.SHARD and self._comm.size > 1:
            partial = self._comm.all_reduce(partial)
        bias = self._blocks["own"].get(f"layers.{layer}.o_bias")
        return partial if bias is None else partial + bias

    def mlp(self, layer: int, hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """hidden [T_r, D] through norm and MLP or experts; returns what is to be added to the residual, [T_r, D].

        Hidden states are gathered before the norm, since the norm is the network's first operation.
        """
        if self.spec.tokens is Tokens.SPREAD:
            hidden = self._comm.all_gather(hidden.contiguous(), counts)
        count = len(hidden)
        if self.model.layers[layer] is LayerKind.DENSE:
            return self._summed(self._run("dense_mlp", layer, count, {"hidden": hidden}), count, counts)
        if self._executor.signature("moe_in") is None:
            inputs = {"hidden": hidden, "first_expert": self._first_expert}
            return self._summed(self._run("moe", layer, count, inputs), count, counts)
        found = self._run("moe_in", layer, count, {"hidden": hidden})
        own, p = self._blocks["own"], f"layers.{layer}.experts."
        x, choice, weight = found["x"], found["choice"], found["weight"]
        routed = grouped_experts(x, choice, weight, own[p + "gate_up"], own[p + "down"], self._first_local)
        if "shared" in found:
            routed += found["shared"]
        return self._summed({"partial": routed}, count, counts)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [W, D] of the wanted positions, the same on all ranks; returns this rank's logits [W, V_r]."""
        found = self._run("head", None, len(hidden), {"hidden": hidden})
        return found["logits"] if found else hidden.new_empty((len(hidden), 0))

    def _summed(self, found: Mapping[str, torch.Tensor], rows: int, counts: Sequence[int]) -> torch.Tensor:
        """A network's result summed over ranks, unless the network has done so: [T, D], or where tokens are spread only
        this rank's tokens, [T_r, D]."""
        if "sum" in found:
            return found["sum"]
        partial = found.get("partial")
        if partial is None:
            partial = self._like.new_zeros((rows, self.model.hidden_size))
        if self.spec.tokens is Tokens.SPREAD:
            return self._comm.reduce_scatter(partial, counts)
        return self._comm.all_reduce(partial)

    def _run(
        self,
        kind: str,
        layer: int | None,
        rows: int,
        activations: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor] | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Runs a network and returns its outputs; empty if this rank has no such network. rows: the size that -1 in
        outputs' shapes stands for. outputs: where to write them; None: new tensors."""
        signature = self._executor.signature(kind)
        if signature is None:
            return {}
        if outputs is None:
            outputs = {
                name: torch.empty([rows if n < 0 else n for n in shape], dtype=dtype, device=self._like.device)
                for name, (shape, dtype) in signature.outputs.items()
            }
        if rows:
            bound = self._weights(kind, layer, signature)
            given = {name: activations[name].contiguous() for name in signature.inputs if name not in bound}
            self._executor.run(kind, layer, {**bound, **given}, outputs)
        return outputs

    def _number(self, value: int) -> torch.Tensor:
        """A number as an input tensor on the networks' device."""
        return torch.tensor([value], dtype=torch.int32, device=self._like.device)

    def _weights(self, kind: str, layer: int | None, signature: Signature) -> dict[str, torch.Tensor]:
        """The network's inputs that are weights, whose names are block.tensor; kept for later calls."""
        key = (kind, layer)
        if key not in self._bound:
            found = {}
            for name in signature.inputs:
                block, _, tensor = name.partition(".")
                if tensor:
                    held = self._blocks[block]
                    found[name] = held[tensor] if tensor in held else held[f"layers.{layer}.{tensor}"]
            self._bound[key] = found
        return self._bound[key]
