"""Plugin layers run as TensorRT would run them: its order of arguments, its launch parameters, for the run's sizes.

In Triton's interpreter, or on the GPU, against the plain references.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from splash_plugins.grouped_experts.reference import sum_of_experts
from splash_plugins.plugin_references import REFERENCES
from tests.oracles.tensorrt_stub import PluginLayer, install
from tests.plugins.layers import ALL_HEADS, BY_NAME, HEADS, LATENT, PAGE_TOKENS, TOP_K, WIDTH, Layer, sizes_of
from tests.plugins.test_registrations import sources  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")]
POISON = 3.0e38
DTYPES = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}


class Runner:
    """Builds a layer as TensorRT does, and runs its kernel with tensors."""

    def __init__(self, device: str) -> None:
        self._entries: list[Any] = []
        self._device = device

    def compile_entry(self, entry: Any, target: Any) -> Any:
        from splash_plugins.aot import Compiled

        self._entries.append(entry)
        return Compiled(entry.function.__name__, "", 32 * entry.num_warps, 0)

    def __call__(
        self, layer: Layer, inputs: Mapping[str, torch.Tensor], change: Callable[[dict[str, Any]], None] | None = None
    ) -> list[torch.Tensor]:
        from tests.plugins.register import DTYPES as TENSORRT

        described = [(dims, TENSORRT["float32" if t == "rows" else t]) for dims, t in layer.inputs.values()]
        built = PluginLayer(layer.plugin, described, layer.attributes)
        entry = self._entries[-1]
        sizes: dict[str, int] = {}
        for (dims, _), tensor in zip(layer.inputs.values(), inputs.values(), strict=True):
            sizes |= {d: n for d, n in zip(dims, tensor.shape, strict=True) if isinstance(d, str)}
        launch = built.launch(sizes)
        outputs = []
        for shape, alias, (_, dtype) in zip(
            built.output_shapes(sizes), built.aliases, layer.outputs.values(), strict=True
        ):
            fresh = torch.full(shape, POISON, dtype=DTYPES.get(dtype, torch.float32), device=self._device)
            outputs.append(fresh if alias < 0 else list(inputs.values())[alias])
        constexprs = dict(entry.constexprs)
        if change is not None:
            change(constexprs)
        arguments = [*inputs.values(), *launch.scalars, *outputs]
        entry.function[launch.grid](*arguments, **constexprs, num_warps=entry.num_warps, num_stages=entry.num_stages)
        return outputs


@pytest.fixture
def run(sources: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:  # noqa: F811
    forget_tensorrt()
    install(sources / "11.4.0.106" / "tensorrt_bindings")
    from splash_plugins.aot import target_of
    from splash_plugins.registrations import FOLDERS, register_all

    runner = Runner(device)
    for folder in FOLDERS:
        monkeypatch.setattr(
            importlib.import_module(f"splash_plugins.{folder}.trt"), "compile_entry", runner.compile_entry
        )
    register_all(target_of((9, 0)))
    yield runner
    forget_tensorrt()  # the stub, which others would take for the package


def forget_tensorrt() -> None:
    for name in list(sys.modules):
        ours = name.startswith("splash_plugins.") and name.endswith(("trt", "trt_support"))
        if ours or name == "tensorrt" or name.startswith("tensorrt."):
            del sys.modules[name]


def random_of(layer: Layer, tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Random floats, and zeros for integers, which the tests fill."""
    torch.manual_seed(tokens)
    sizes = sizes_of(tokens)
    made = {}
    for name, (dims, dtype) in layer.inputs.items():
        shape = [sizes[d] if isinstance(d, str) else d for d in dims]
        kind = DTYPES.get(dtype, torch.float32)
        made[name] = (
            torch.randn(shape).to(device) if kind is torch.float32 else torch.zeros(shape, dtype=kind, device=device)
        )
    return made


def expected_of(layer: Layer, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return REFERENCES[layer.plugin](*[tensor.clone() for tensor in inputs.values()], **layer.attributes)


@pytest.mark.parametrize("tokens", [1, 5])
def test_lse_merge(run: Runner, device: str, tokens: int) -> None:
    layer = BY_NAME["lse_merge"]
    inputs = random_of(layer, tokens, device)
    inputs["lses"][0, 0] = -torch.inf
    inputs["lses"][:, -1, 1] = -torch.inf
    expected = expected_of(layer, inputs)
    inputs["outs"][0, 0] = torch.nan  # a part with nothing may hold anything
    out, lse = run(layer, inputs)
    torch.testing.assert_close((out, lse), expected)
    assert bool((out[-1, 1] == 0).all()) and float(lse[-1, 1]) == -torch.inf


def test_cache_append(run: Runner, device: str) -> None:
    layer = BY_NAME["cache_append"]
    inputs = random_of(layer, 5, device)
    inputs["page"].copy_(torch.tensor([3, -1, 8, 3, 0]))
    inputs["offset"].copy_(torch.tensor([0, 4, PAGE_TOKENS - 1, 7, 2]))
    before = inputs["pool"].clone()
    (expected,) = expected_of(layer, inputs)
    (pool,) = run(layer, inputs)
    assert pool is inputs["pool"] and torch.equal(pool, expected) and int((pool != before).any(dim=-1).sum()) == 4


def test_page_transfer(run: Runner, device: str) -> None:
    layer = BY_NAME["page_transfer"]
    inputs = random_of(layer, 4, device)
    inputs["taken"].copy_(torch.tensor([6, 1, 2, 0]))
    inputs["placed"].copy_(torch.tensor([0, 8, -1, 5]))
    (expected,) = expected_of(layer, inputs)
    (pool,) = run(layer, inputs)
    assert pool is inputs["pool"] and torch.equal(pool, expected) and torch.equal(pool[5], inputs["source"][0])


def test_mla_attention(run: Runner, device: str) -> None:
    layer = BY_NAME["mla_attention"]
    inputs = random_of(layer, 5, device)
    inputs["tables"].copy_(torch.randint(0, 9, inputs["tables"].shape))
    inputs["slot"].copy_(torch.tensor([4, 0, 2, 2, 1]))
    inputs["first"].copy_(torch.tensor([0, 1, 0, 2, 0]))
    inputs["length"].copy_(torch.tensor([64, 33, 0, 1, 17]))
    torch.testing.assert_close(tuple(run(layer, inputs)), expected_of(layer, inputs), rtol=1e-4, atol=1e-5)


def test_mla_prefill(run: Runner, device: str) -> None:
    """Two requests' queries: a whole prompt, and the end of one whose beginning is cached; rows 4 … 29 are theirs."""
    layer = BY_NAME["mla_prefill"]
    inputs = random_of(layer, 13, device)
    inputs["position"].copy_(torch.cat([torch.arange(8), torch.arange(13, 18)]))
    inputs["segments"].copy_(torch.tensor([[0, 8, 4, 12, 0], [8, 13, 12, 30, 0]]))
    inputs["tiles"].copy_(torch.tensor([[0, 0], [1, 8], [-1, 0]]))  # the last one is padding
    expected = expected_of(layer, inputs)
    assert not bool(expected[0].isnan().any())
    torch.testing.assert_close(tuple(run(layer, inputs)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 6])
def test_grouped_experts(run: Runner, device: str, tokens: int) -> None:
    up, down = BY_NAME["grouped_experts_up"], BY_NAME["grouped_experts_down"]
    first = random_of(up, tokens, device)
    first["choice"].copy_(torch.stack([torch.randperm(8)[:TOP_K] for _ in range(tokens)]))
    first["choice"][-1, 1] = -1
    first["gate_up"] *= 0.1
    (hidden,) = run(up, first)
    (expected,) = expected_of(up, first)
    here = ~expected.isnan()
    torch.testing.assert_close(hidden[here], expected[here], rtol=1e-4, atol=1e-5)
    second = random_of(down, tokens, device) | {"hidden": hidden, "choice": first["choice"]}
    (out,) = run(down, second)
    torch.testing.assert_close((out,), expected_of(down, second), rtol=1e-4, atol=1e-5)
    both = torch.empty_like(out)
    weights = (first["gate_up"], second["down"], 4, None, both)
    sum_of_experts(first["x"], first["choice"], second["weight"], *weights)
    torch.testing.assert_close(out, both, rtol=1e-4, atol=1e-5)


def without_meeting(constexprs: dict[str, Any]) -> None:
    constexprs["MEET"] = False


def test_dop_exchange_and_return(run: Runner, device: str) -> None:
    """Two ranks' mailboxes in one process: the second rank's view of both directions."""
    put, exchange, back = (BY_NAME[n] for n in ("dop_put", "dop_exchange", "dop_return"))
    boxes, queries = [], []
    for rank in range(2):
        inputs = random_of(put, 6, device)
        inputs["rows"] += rank
        (box,) = run(put, inputs)
        boxes.append(box)
        queries.append(inputs["rows"])
    bases = torch.tensor([box.data_ptr() for box in boxes], device=device)
    owned = torch.tensor([4, 0, -1], dtype=torch.int32, device=device)
    (got,) = run(exchange, {"box": boxes[1], "bases": bases, "owned": owned}, without_meeting)
    everyone = torch.cat(queries, dim=1)
    assert torch.equal(got[:2], everyone[[4, 0]]) and bool((got[2] == POISON).all())

    results = [torch.randn((3, ALL_HEADS, LATENT), device=device) for _ in range(2)]
    for box, rows in zip(boxes, results, strict=True):
        box[16384 : 16384 + rows.numel()] = rows.flatten()
    owner = torch.tensor([1, 0, -1, 0, 1, 0], dtype=torch.int32, device=device)
    place = torch.tensor([1, 2, 0, 0, 0, 1], dtype=torch.int32, device=device)
    (out,) = run(back, {"box": boxes[1], "bases": bases, "owner": owner, "place": place}, without_meeting)
    for token, (rank, row) in enumerate(zip(owner.tolist(), place.tolist(), strict=True)):
        if rank >= 0:
            assert torch.equal(out[token], results[rank][row, HEADS : 2 * HEADS])
    assert WIDTH > LATENT
