"""The engine "evaluator": networks lowered for tensorrt_rtx, executed by tests/oracles/network_evaluator.

Plugged in where workers make their runners, so that a whole server runs on it: `with evaluator(): LLM(...)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from splash_engines.kernels import Kernels
from splash_engines.tensorrt.engine import NetworkEngine, Signature
from splash_engines.tensorrt.graph import Graph
from splash_engines.tensorrt.segments import ATTEND, Lowering
from splash_engines.tensorrt.sizes import Sizes, sizes_of
from splash_engines.trt_api import Api, load_api
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.board import Watch
from splash_trt.dist.collectives import Collectives
from splash_trt.dist.world import World
from splash_trt.layout.spec import SPECS, Tokens
from splash_trt.models.config import ModelConfig
from splash_trt.runtime.cpu_runner import cpu_runner
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.runtime.device_step import RankState
from splash_trt.runtime.network_program import NetworkProgram
from splash_trt.runtime.peers import Peers
from tests.oracles.network_evaluator import NetworkEvaluator

REAL = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}
"""What FLOAT is computed in, for each dtype of an engine; with float64 the networks are float32's."""


@functools.cache
def api() -> Api:
    return load_api(None, ("sm_89", "sm_120"))


@dataclass
class Networks:
    """Lowered and read back once for each kind and sizes, whatever rank or layout asks.

    edit: called with every lowered network before it is read, to plant a defect. lower: the lowering, to replace it.
    """

    model: ModelConfig
    dtype: torch.dtype
    experts: str = "moe"
    """moe: in the network; moe_in: routed in the network, computed by the plugin's reference."""
    collectives_in: bool = False
    """Sums over ranks are DistCollective layers where tokens are everywhere."""
    lower: Callable[..., Graph | None] | None = None
    edit: Callable[[str, Graph], None] = lambda kind, graph: None
    made: dict[Any, NetworkEvaluator | None] = field(default_factory=dict)
    builder: Any = None
    calls: dict[str, int] = field(default_factory=dict)

    def get(self, kind: str, sizes: Sizes, heads: int = 0, num_ranks: int = 0) -> NetworkEvaluator | None:
        key = (kind, sizes, heads, num_ranks)
        if key not in self.made:
            self.builder = self.builder or api().create_builder()
            dtype = "bfloat16" if self.dtype is torch.bfloat16 else "float32"
            lowering = Lowering(
                api=api(), builder=self.builder, model=self.model, dtype=dtype, num_ranks=num_ranks
            )
            graph = (self.lower or Lowering.__call__)(lowering, kind, sizes, heads)
            if graph is not None:
                self.edit(kind, graph)
            real = REAL[self.dtype]
            self.made[key] = graph and NetworkEvaluator(api().trt, graph.network, real=real)
        self.calls[kind] = self.calls.get(kind, 0) + 1
        return self.made[key]


class EvaluatorExecutor:
    """The networks of one rank under one layout."""

    def __init__(self, networks: Networks, layout: Layout, collectives: Collectives) -> None:
        self._networks = networks
        self._sizes = sizes_of(networks.model, layout, collectives.rank, collectives.size, 0)
        self._all_reduce = collectives.all_reduce
        summed = networks.collectives_in and SPECS[layout].tokens is Tokens.EVERYWHERE and collectives.size > 1
        self._num_ranks = collectives.size if summed else 0
        self._signatures: dict[str, Signature | None] = {}

    def _get(self, kind: str) -> NetworkEvaluator | None:
        return self._networks.get(kind, self._sizes, num_ranks=self._num_ranks)

    def signature(self, kind: str) -> Signature | None:
        if kind in ("moe", "moe_in") and kind != self._networks.experts:
            return None
        if kind not in self._signatures:
            network = self._get(kind)
            self._signatures[kind] = network and Signature(
                inputs=tuple(network.inputs), outputs={n: (v.shape, v.dtype) for n, v in network.outputs.items()}
            )
        return self._signatures[kind]

    def run(
        self, kind: str, layer: int | None, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        network = self._get(kind)
        assert network is not None
        for name, found in network(inputs, self._all_reduce).items():
            assert found.shape == outputs[name].shape and found.dtype == outputs[name].dtype
            outputs[name].copy_(found)


@contextmanager
def evaluator(networks: Networks, *, attention: bool = True) -> Iterator[Networks]:
    """Runners made inside have programs of `networks`, which are of their model and dtype.

    attention: the plugin mla_attention is networks too, else it is its reference.
    """

    def make(world: World, *rest: Any) -> DeviceRunner:
        collectives = world.collectives

        def program(
            model: ModelConfig, config: EngineConfig, layout: Layout, kernels: Kernels, peers: Peers,
            state: RankState, watch: Watch,
        ) -> NetworkProgram:  # fmt: skip
            executor = EvaluatorExecutor(networks, layout, collectives)
            engine = NetworkEngine(model, SPECS[layout], state.weights, collectives, executor)
            return NetworkProgram(model, config, layout, kernels, peers, state, watch, engine=engine)

        return cpu_runner(world, *rest, program=program)

    plugin = "splash_plugins.mla_attention"
    with ExitStack() as stack:
        stack.enter_context(patch("splash_trt.worker.make_runner", make))
        if attention:
            stack.enter_context(patch(f"{plugin}.decode_reference.mla_decode", Attend(networks).absorbed))
            stack.enter_context(patch(f"{plugin}.prefill_reference.mla_prefill", Attend(networks).expanded))
        yield networks


class Attend:
    """The functions of plugins/mla_attention, by the networks that stand for them."""

    def __init__(self, networks: Networks) -> None:
        self._networks = networks

    def _network(self, kind: str, heads: int, page_tokens: int) -> NetworkEvaluator:
        sizes = Sizes(dense=(), moe=(), attend_heads=(heads,), sharded=False, page_tokens=page_tokens)
        assert kind in ATTEND
        found = self._networks.get(kind, sizes, heads)
        assert found is not None
        return found

    def absorbed(
        self, q: torch.Tensor, pages: torch.Tensor, tables: torch.Tensor, length: torch.Tensor, *, latent: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        n, heads, width = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        if not n or not heads or not tables.shape[1]:
            return q.new_zeros((n, heads, latent), dtype=dtype), q.new_full((n, heads), -torch.inf, dtype=dtype)
        num_pages, page_tokens = pages.shape[:2]
        layers = pages.stride(0) // (page_tokens * width)
        # The pool from one layer before this one on, so that where a layer begins matters.
        rows = (num_pages - 1) * layers * page_tokens + 2 * page_tokens
        pool = pages.as_strided((rows, width), (width, 1), pages.storage_offset() - page_tokens * width)
        found = self._network("attend_absorbed", heads, page_tokens)({
            "q": q.contiguous(),
            "pool": pool,
            "first_row": torch.tensor([page_tokens], dtype=torch.int32),
            "tables": tables.to(torch.int32),
            "length": length.to(torch.int32),
        })
        return found["out"], found["lse"]

    def expanded(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, q_position: torch.Tensor, k_nope: torch.Tensor,
        k_rope: torch.Tensor, v: torch.Tensor, first_key: int, *, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        found = self._network("attend_expanded", q_nope.shape[1], 0)({
            "q_nope": q_nope,
            "q_rope": q_rope,
            "q_position": q_position.to(torch.int32),
            "k_nope": k_nope,
            "k_rope": k_rope,
            "v": v,
            "first_key": torch.tensor([first_key], dtype=torch.int32),
        })
        return found["out"], found["lse"]
