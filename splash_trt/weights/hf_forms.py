"""How each of the engine's tensors is stored in Hugging Face files: names and shapes there, and how to read a part.

D hidden, H heads, E experts, I intermediate. Matrices in the files are [out, in]. A Form serves both to check a
checkpoint's shapes and to read its values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.spec import TensorSpec, part_of_experts

Open = Callable[[str], Any]
"""From a tensor's name in the file to its safetensors slice, which reads only the part that is indexed."""
Shapes = Mapping[str, tuple[int, ...]]


class Form(Protocol):
    def shapes(self) -> Shapes:
        """The tensors in the file that the engine's tensor is made of, each with its shape."""
        ...

    def read(self, open_slice: Open, begin: int, end: int, out: torch.Tensor) -> None:
        """Write rows [begin, end) along the engine's cut axis into `out`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The same tensor in the file, read by parts of axis 0, 1 or 2."""

    name: str
    shape: tuple[int, ...]
    axis: int = 0

    def shapes(self) -> Shapes:
        return {self.name: self.shape}

    def read(self, open_slice: Open, begin: int, end: int, out: torch.Tensor) -> None:
        out.copy_(open_slice(self.name)[(slice(None),) * self.axis + (slice(begin, end),)])


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """[H * stride, C] in the file, [H, rows, C] in the engine: of each head's `stride` rows, those from `offset` on."""

    name: str
    heads: int
    stride: int
    offset: int
    rows: int
    columns: int

    def shapes(self) -> Shapes:
        return {self.name: (self.heads * self.stride, self.columns)}

    def read(self, open_slice: Open, begin: int, end: int, out: torch.Tensor) -> None:
        part = open_slice(self.name)[begin * self.stride : end * self.stride]
        heads = part.view(end - begin, self.stride, self.columns)
        out.copy_(heads[:, self.offset : self.offset + self.rows])


@dataclass(frozen=True, kw_only=True)
class HeadColumns:
    """[D, H * width] in the file (the output projection), [H, width, D] in the engine."""

    name: str
    heads: int
    width: int
    hidden: int

    def shapes(self) -> Shapes:
        return {self.name: (self.hidden, self.heads * self.width)}

    def read(self, open_slice: Open, begin: int, end: int, out: torch.Tensor) -> None:
        part = open_slice(self.name)[:, begin * self.width : end * self.width]
        out.copy_(part.unflatten(1, (end - begin, self.width)).permute(1, 2, 0))


@dataclass(frozen=True, kw_only=True)
class GatedPair:
    """Two tensors [I, D] in the file, [2, I, D] in the engine."""

    gate: str
    up: str
    shape: tuple[int, int]

    def shapes(self) -> Shapes:
        return {self.gate: self.shape, self.up: self.shape}

    def read(self, open_slice: Open, begin: int, end: int, out: torch.Tensor) -> None:
        for target, name in zip(out, (self.gate, self.up), strict=True):
            target.copy_(open_slice(name)[begin:end])


@dataclass(frozen=True, kw_only=True)
class PerExpert:
    """For each expert e, the tensors named {prefix}{e}.{suffix}.weight, all of one shape, stacked along their rows.

    Read by parts of axis 0 (experts), 1 (rows: first all of the first suffix) or 2 (columns).
    """

    prefix: str
    suffixes: tuple[str, ...]
    num_experts: int
    shape: tuple[int, int]
    axis: int

    def _name(self, expert: int, suffix: str) -> str:
        return f"{self.prefix}{expert}.{suffix}.weight"

    def shapes(self) -> Shapes:
        return {self._name(e, suffix): self.shape for e in range(self.num_experts) for suffix in self.suffixes}

    def read(self, open_slice: Open, begin: int, end: int, out: torch.Tensor) -> None:
        shape = (self.num_experts, len(self.suffixes) * self.shape[0], self.shape[1])
        experts, wanted, columns = part_of_experts(shape, self.axis, begin, end)
        for expert, target in zip(experts, out, strict=True):
            for i, suffix in enumerate(self.suffixes):
                before = i * self.shape[0]
                rows = range(max(wanted.start, before), min(wanted.stop, before + self.shape[0]))
                if rows:
                    part = open_slice(self._name(expert, suffix))[rows.start - before : rows.stop - before, columns]
                    target[rows.start - wanted.start : rows.stop - wanted.start].copy_(part)


_TOP = MappingProxyType(
    {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
)

_IN_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "q_a": "self_attn.q_a_proj.weight",
        "q_a_bias": "self_attn.q_a_proj.bias",
        "q_a_norm": "self_attn.q_a_layernorm.weight",
        "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
        "kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias",
        "kv_a_norm": "self_attn.kv_a_layernorm.weight",
        "o_bias": "self_attn.o_proj.bias",
        "index_k": "self_attn.indexer.wk.weight",
        "index_k_norm": "self_attn.indexer.k_norm.weight",
        "index_k_norm_bias": "self_attn.indexer.k_norm.bias",
        "index_weights": "self_attn.indexer.weights_proj.weight",
        "router": "mlp.gate.weight",
        "router_bias": "mlp.gate.e_score_correction_bias",
    }
)


def form_of(spec: TensorSpec, model: ModelConfig, present: Container[str]) -> Form:
    """The form of one of the engine's tensors, in a checkpoint that has tensors of the names `present`."""
    if spec.name in _TOP:
        return Plain(name=_TOP[spec.name], shape=spec.shape)
    _, index, name = spec.name.split(".", 2)
    layer = f"model.layers.{index}."
    if name in _IN_LAYER:
        return Plain(name=layer + _IN_LAYER[name], shape=spec.shape)
    if name == "index_q":
        heads, rows, columns = spec.shape
        file_name = layer + "self_attn.indexer.wq_b.weight"
        return HeadRows(name=file_name, heads=heads, stride=rows, offset=0, rows=rows, columns=columns)
    if name in ("q_b", "w_uk", "w_uv", "o"):
        return _attention_form(name, model, layer + "self_attn.")
    if name.startswith("experts."):
        return _experts_form(spec, layer + "mlp.experts.", present)
    if name.startswith("shared."):
        return _mlp_form(spec, layer + "mlp.shared_experts.")
    assert model.layers[int(index)] is LayerKind.DENSE, spec.name
    return _mlp_form(spec, layer + "mlp.")


def _attention_form(name: str, model: ModelConfig, prefix: str) -> Form:
    heads, nope, value = model.num_heads, model.qk_nope_head_dim, model.v_head_dim
    if name == "o":
        return HeadColumns(name=prefix + "o_proj.weight", heads=heads, width=value, hidden=model.hidden_size)
    if name == "q_b":
        file_name = "q_proj.weight" if model.q_lora_rank is None else "q_b_proj.weight"
        return HeadRows(
            name=prefix + file_name,
            heads=heads,
            stride=model.qk_head_dim,
            offset=0,
            rows=model.qk_head_dim,
            columns=model.hidden_size if model.q_lora_rank is None else model.q_lora_rank,
        )
    return HeadRows(
        name=prefix + "kv_b_proj.weight",
        heads=heads,
        stride=nope + value,
        offset=0 if name == "w_uk" else nope,
        rows=nope if name == "w_uk" else value,
        columns=model.kv_lora_rank,
    )


def _mlp_form(spec: TensorSpec, prefix: str) -> Form:
    if spec.name.endswith("down"):
        return Plain(name=prefix + "down_proj.weight", shape=spec.shape, axis=spec.axis)
    _, inner, hidden = spec.shape
    return GatedPair(gate=prefix + "gate_proj.weight", up=prefix + "up_proj.weight", shape=(inner, hidden))


def _experts_form(spec: TensorSpec, prefix: str, present: Container[str]) -> Form:
    """One tensor for all experts if the checkpoint has that, otherwise one or two for each expert."""
    down = spec.name.endswith("down")
    fused = prefix + ("down_proj" if down else "gate_up_proj")
    if fused in present:
        return Plain(name=fused, shape=spec.shape, axis=spec.axis)
    suffixes = ("down_proj",) if down else ("gate_proj", "up_proj")
    num_experts, rows, columns = spec.shape
    return PerExpert(
        prefix=prefix,
        suffixes=suffixes,
        num_experts=num_experts,
        shape=(rows // len(suffixes), columns),
        axis=spec.axis,
    )
