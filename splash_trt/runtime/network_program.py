"""A step's program whose dense parts are networks: `Program` with NetworkEngine's segments in place of its products.

Networks have borders of their own: norms are inside of them, queries come rotated, and each returns what is added to
the residual. So how a step is cut into segments is here; arrays, attention with its meetings, sampling and switches are
the same. Nothing is padded or captured. Letters as in program.py.
"""

from __future__ import annotations

import torch

from splash_engines.kernels import Kernels
from splash_engines.tensorrt.engine import NetworkEngine
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.board import Watch
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.device_step import DeviceStep, RankState
from splash_trt.runtime.latent_attention import LatentAttention
from splash_trt.runtime.peers import Peers
from splash_trt.runtime.program import Program


class NetworkProgram(Program):
    """The model under one layout, which is the engine's too."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        layout: Layout,
        kernels: Kernels,
        peers: Peers,
        state: RankState,
        watch: Watch,
        *,
        engine: NetworkEngine,
    ) -> None:
        assert not config.simulate_routing, "networks have none"
        if config.experts_cut != "whole":
            raise ValueError(
                f"experts_cut: {config.experts_cut!r} is not what networks are built for; they want whole experts"
            )
        super().__init__(model, config, layout, kernels, peers, state, watch)
        self._engine = engine
        self._between = NetworkAttention(model, layout, kernels, peers, state, engine)

    def __call__(self, step: DeviceStep, logits: torch.Tensor | None = None) -> torch.Tensor:
        """[W, V_r] logits, in float32 or wider."""
        assert logits is None
        engine, a = self._engine, step.arrays
        self._peers.begin()
        hidden = engine.embed(self._ids(a), step.counts)
        cos, sin = self._rope(a["position"])
        for layer in range(self._model.num_layers):
            self._watch.layer(layer)
            values = self._between.values(layer, hidden, cos, sin, step)
            hidden = hidden + engine.attention_out(layer, values)
            hidden = hidden + engine.mlp(layer, hidden, step.counts)
        return engine.head(self._wanted(hidden, step))


class NetworkAttention(LatentAttention):
    """`values` takes hidden states that are not normed."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        kernels: Kernels,
        peers: Peers,
        state: RankState,
        engine: NetworkEngine,
    ) -> None:
        super().__init__(model, layout, kernels, peers, state)
        self._engine = engine

    def _queries(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, a: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T_r, H, nope + R], rotated."""
        q_nope, q_rope, rows = self._engine.attention_in(layer, x, cos, sin)
        pages = self._state.storage.layer(layer)
        for page in ("page", "target_page"):
            self._k.append(pages, rows, a[page], a["offset"])
        return torch.cat([q_nope, q_rope], dim=-1), rows

    def _rotate(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        pass

    def _absorb(self, layer: int, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        q_nope, q_rope = q.split([self._model.qk_nope_head_dim, self._model.qk_rope_head_dim], dim=-1)
        out[:, : q.shape[1]] = self._engine.absorb(layer, q_nope, q_rope)

    def _local(
        self, layer: int, absorbed: torch.Tensor, pages: torch.Tensor, step: DeviceStep, out: torch.Tensor
    ) -> None:
        wide = torch.promote_types(self._dtype, torch.float32)
        latents = absorbed.new_empty((*absorbed.shape[:2], self._model.kv_lora_rank), dtype=wide)
        self._k.decode(absorbed, pages, *self._reads(step), latents, None)
        self._value_up(layer, latents, out)

    def _value_up(self, layer: int, latents: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._engine.v_up(layer, latents))

    def _expand(self, layer: int, latents: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        return self._engine.expand_kv(layer, latents, self._state.expanded)
