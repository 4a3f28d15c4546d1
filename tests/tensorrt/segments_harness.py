"""One rank's segments computed twice, by plain torch and by evaluated networks, on the same inputs.

Ranks are not run: `Alone` stands for the others' part of every exchange with values of its own, the same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

from splash_engines.tensorrt.engine import NetworkEngine
from splash_plugins.mla_attention.reference import mla_decode, mla_prefill
from splash_trt.cache.storage import PageStorage
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Residency, Tokens
from splash_trt.memory.arena import DTYPES, Arena
from splash_trt.memory.map import memory_map
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.dummy import DummyWeights
from splash_trt.weights.spec import TensorSpec
from splash_trt.weights.store import WeightStore
from tests.oracles.network_evaluator import NetworkError
from tests.oracles.torch_segments import TorchSegments
from tests.tensorrt.evaluated import Attend, EvaluatorExecutor, Networks

TOKENS = 24
PAGE_TOKENS = 4

Pair = tuple[str, torch.Tensor, torch.Tensor]
"""What was computed, by torch and by the network."""


class AnyWeights(DummyWeights):
    """Norms are not one and biases not zero, so that each of them matters."""

    def read(self, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        norm = spec.name.endswith("norm")
        if not norm and not spec.name.endswith("_bias"):
            super().read(spec, begin, end, out)
            return
        digest = hashlib.blake2b(spec.name.encode(), digest_size=7).digest()
        drawn = torch.randn(spec.shape, generator=_generator(int.from_bytes(digest, "little")), dtype=torch.float64)
        wide = 0.3 if not spec.name.endswith("router_bias") else 0.1  # a larger one would choose alone
        out.copy_((float(norm) + wide * drawn).narrow(spec.axis, begin, end - begin))


class Alone:
    """Rank `rank` of `size` whose partners say something that depends on the call alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else x + self._others(x)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        whole = torch.randn((sum(counts), *x.shape[1:]), generator=_generator(5), dtype=torch.float64).to(x.dtype)
        first = sum(counts[: self.rank])
        whole[first : first + len(x)] = x
        return whole

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        first = sum(counts[: self.rank])
        return self.all_reduce(x)[first : first + counts[self.rank]]

    def all_to_all(self, send: Sequence[torch.Tensor], recv_shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        raise AssertionError("no segment does this")

    @staticmethod
    def _others(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=_generator(6), dtype=torch.float64).to(x.dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Rank:
    """The weights of one rank, and both forms of the segments over them."""

    def __init__(
        self, model: ModelConfig, layout: Layout, rank: int, size: int, dtype: str, networks: Networks,
        memory_bytes: int = 6 << 20,
    ) -> None:  # fmt: skip
        config = EngineConfig(
            num_ranks=size, dtype=dtype, page_tokens=PAGE_TOKENS, memory_bytes=memory_bytes, max_batch_tokens=256,
            context_block_tokens=16,
        )
        self.model, self.layout, self.networks = model, layout, networks
        self.dtype = DTYPES[dtype]
        arena = Arena(memory_map(model, config, rank))
        weights = WeightStore(arena, model, rank, size, dtype, config.experts_cut)
        weights.load_own(AnyWeights(model, 3))
        self.heads = len(weights.own["layers.0.q_b"])
        if SPECS[layout].residency is Residency.FULL and size > 1:
            weights.load_others(AnyWeights(model, 3))
            self.heads = model.num_heads
        self.storage = PageStorage(arena, model, PAGE_TOKENS, self.dtype)
        comm = Alone(rank, size)
        self.comm = comm
        spec = SPECS[layout]
        self.torch = TorchSegments(model, spec, weights, comm)
        self.network = NetworkEngine(model, spec, weights, comm, EvaluatorExecutor(networks, layout, comm))
        self.counts = [2] * size if spec.tokens is Tokens.SPREAD else [TOKENS] * size
        if spec.tokens is Tokens.SPREAD:
            self.counts[rank] = TOKENS

    def pairs(self) -> Iterator[Pair]:
        """Everything that the rank's segments compute, for one layer of each kind."""
        model, tokens = self.model, TOKENS
        spread = SPECS[self.layout].tokens is Tokens.SPREAD
        total = sum(self.counts) if spread else tokens
        ids = torch.randint(0, model.vocab_size, (total,), generator=_generator(1))
        yield from self._both("embed", lambda e: e.embed(ids, self.counts))
        hidden = self._random(2, tokens, model.hidden_size)
        angle = torch.rand((tokens, model.qk_rope_head_dim // 2), generator=_generator(3), dtype=torch.float64) * 6
        wide = torch.promote_types(self.dtype, torch.float32)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        last = model.num_layers - 1
        yield from self._both("attention_in", lambda e: e.attention_in(last, hidden, cos, sin))
        q_nope = self._random(4, tokens, self.heads, model.qk_nope_head_dim)
        q_rope = self._random(5, tokens, self.heads, model.qk_rope_head_dim)
        yield from self._both("absorb", lambda e: e.absorb(last, q_nope, q_rope))
        latents = self._random(6, tokens, self.heads, model.kv_lora_rank).to(wide)
        yield from self._both("v_up", lambda e: e.v_up(last, latents))
        context = self._random(7, 11, model.kv_lora_rank)
        workspace = context.new_zeros(11 * model.num_heads * (model.qk_nope_head_dim + model.v_head_dim))
        yield from self._both(
            "expand_kv",
            lambda e: [
                part.clone() for block in e.expand_kv(last, context, workspace) for part in block[1:] if part.numel()
            ],
        )
        values = self._random(8, tokens, self.heads, model.v_head_dim)
        yield from self._both("attention_out", lambda e: e.attention_out(last, values))
        for kind in LayerKind:
            if kind in model.layers:
                layer = max(i for i, each in enumerate(model.layers) if each is kind)
                yield from self._both(f"mlp.{kind.value}", lambda e, n=layer: e.mlp(n, hidden, self.counts))
        yield from self._both("head", lambda e: e.head(hidden))
        if self.heads:
            yield from self._attend()

    def _attend(self) -> Iterator[Pair]:
        model, attend, layer = self.model, Attend(self.networks), self.model.num_layers - 1
        pages = self.storage.layer(layer)
        self.storage.pages[:6] = torch.randn((6, *self.storage.pages.shape[1:]), generator=_generator(9))
        tables = torch.tensor([[3, 1, 5], [2, -1, -1], [0, 4, -1]])
        length = torch.tensor([9, 1, 8])
        pages[5, 1:] = torch.nan  # past the first query's context
        q = self._random(10, 3, self.heads, model.row_width)
        options = {"latent": model.kv_lora_rank, "scale": model.softmax_scale}
        want = mla_decode(q, pages, tables, length, **options)
        yield from _zip("attend_absorbed", want, attend.absorbed(q, pages, tables, length, **options))
        n, keys = 5, 9
        arguments = (
            self._random(11, n, self.heads, model.qk_nope_head_dim),
            self._random(12, n, self.heads, model.qk_rope_head_dim),
            torch.tensor([0, 12, 13, 14, 16]),
            self._random(13, keys, self.heads, model.qk_nope_head_dim),
            self._random(14, keys, model.qk_rope_head_dim),
            self._random(15, keys, self.heads, model.v_head_dim),
            7,
        )
        scale = model.softmax_scale
        want = mla_prefill(*arguments, scale=scale)
        yield from _zip("attend_expanded", want, attend.expanded(*arguments, scale=scale))

    def _both(self, name: str, call: Callable[..., object]) -> Iterator[Pair]:
        yield from _zip(name, _list(call(self.torch)), _list(call(self.network)))

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=_generator(seed), dtype=torch.float64).to(self.dtype)


def _list(found: object) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)  # type: ignore[call-overload]


def _zip(name: str, want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> Iterator[Pair]:
    assert len(want) == len(got), name
    for a, b in zip(want, got, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise NetworkError(f"{name}: {a.dtype} {tuple(a.shape)}, and the network's {b.dtype} {tuple(b.shape)}")
        yield name, a, b


def difference(want: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference, in units of the wanted numbers' size; NaN and a wrong infinity count as infinite."""
    if not want.numel():
        return 0.0
    finite = torch.isfinite(want)
    if not torch.equal(want[~finite], got[~finite]) or not torch.isfinite(got[finite]).all():
        return float("inf")
    size = max(1e-30, float(want[finite].double().square().mean().sqrt()))
    return float((want[finite].double() - got[finite].double()).abs().max()) / size


def worst(rank: Rank) -> dict[str, float]:
    """The largest difference of each segment."""
    found: dict[str, float] = {}
    with torch.inference_mode():
        for name, want, got in rank.pairs():
            found[name] = max(found.get(name, 0.0), difference(want, got))
    return found
