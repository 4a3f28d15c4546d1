"""The real thing: TensorRT executes plans and plugins. `pytest -m tensorrt`, where TensorRT runs on the GPU.

TensorRT-RTX does not run on GPUs of data centres, and plugins are full TensorRT's: what a machine cannot do is skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from splash_engines import ops
from splash_engines.tensorrt.plan_device import CudaDevice
from splash_engines.tensorrt.plan_runtime import DTYPES, PlanExecutor, PlanPool
from splash_engines.tensorrt.plans import Plan, TensorList
from splash_engines.trt_api import Api, capability_name, load_api

pytestmark = pytest.mark.tensorrt


@pytest.fixture(scope="module")
def api() -> Api:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu = capability_name(*torch.cuda.get_device_capability())
    try:
        return load_api(gpu, (gpu,))
    except ValueError as error:
        pytest.skip(str(error))


class Built:
    """One small network, built here and run through the runtime for plans."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.builder = api.create_builder()
        self.network = api.create_network(self.builder)
        self.profile = self.builder.create_optimization_profile()
        self.config = api.create_config(self.builder, (capability_name(*torch.cuda.get_device_capability()),))

    def input(self, name: str, shape: tuple[int, ...], dtype: str, most: int = 64) -> Any:
        tensor = self.network.add_input(name, getattr(self.api.trt.DataType, dtype), shape)
        if -1 in shape:
            bounds = [tuple(n if d < 0 else d for d in shape) for n in (1, min(8, most), most)]
            self.profile.set_shape(name, *bounds)
        return tensor

    def executor(self, outputs: Mapping[str, Any]) -> PlanExecutor:
        for name, tensor in outputs.items():
            tensor.name = name
            self.network.mark_output(tensor)
        self.config.add_optimization_profile(self.profile)
        data = self.api.build(self.builder, self.network, self.config)
        count = self.network.num_inputs
        plan = Plan(
            key="built", kind="built", num_bytes=len(data), checksum="",
            inputs=self._tensors(self.network.get_input(i) for i in range(count)),
            outputs=self._tensors(outputs.values()),
        )  # fmt: skip
        return PlanExecutor(PlanPool(self.api, CudaDevice(), lambda plan: data), {"built": plan})

    @staticmethod
    def _tensors(tensors: Any) -> TensorList:
        return tuple((t.name, tuple(t.shape), t.dtype.name) for t in tensors)


def linear(api: Api) -> PlanExecutor:
    """y [T, 48] = x [T, 64] times own.w [48, 64] transposed, float32."""
    built = Built(api)
    x, w = built.input("x", (-1, 64), "FLOAT"), built.input("own.w", (48, 64), "FLOAT")
    none, transposed = api.trt.MatrixOperation.NONE, api.trt.MatrixOperation.TRANSPOSE
    return built.executor({"y": built.network.add_matrix_multiply(x, none, w, transposed).get_output(0)})


def test_a_plan_computes_and_keeps_to_its_addresses(api: Api) -> None:
    executor = linear(api)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for rows in (1, 5, 64, 5):
            for layer in range(2):
                x, w = torch.randn((rows, 64), device="cuda"), torch.randn((48, 64), device="cuda")
                y = torch.full((rows, 48), torch.nan, device="cuda")
                executor.run("built", layer, {"x": x, "own.w": w}, {"y": y})
                torch.testing.assert_close(y, (x.double() @ w.double().t()).float(), rtol=1e-3, atol=1e-3)


def test_a_captured_plan_is_replayed(api: Api) -> None:
    executor, device = linear(api), CudaDevice()
    x, w, y = (torch.randn(shape, device="cuda") for shape in ((5, 64), (48, 64), (5, 48)))
    replay, _ = device.capture(lambda: executor.run("built", 0, {"x": x, "own.w": w}, {"y": y}))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        replay()
        torch.testing.assert_close(y, x @ w.t(), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def plugins(api: Api) -> Any:
    if not api.features.plugins:
        pytest.skip(f"{api.name} has no plugins")
    from splash_plugins.aot import target_of
    from splash_plugins.registrations import register_all

    register_all(target_of(torch.cuda.get_device_capability()))
    return importlib.import_module("tensorrt.plugin").op.splash


def with_aliases(built: Built) -> Built:
    built.config.set_preview_feature(built.api.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    return built


def test_lse_merge_in_a_network(api: Api, plugins: Any) -> None:
    from splash_plugins.lse_merge.reference import lse_merge

    built = Built(api)
    outs, lses = built.input("outs", (3, -1, 4, 64), "FLOAT"), built.input("lses", (3, -1, 4), "FLOAT")
    layer = built.network.add_plugin(plugins.lse_merge(outs, lses))
    executor = built.executor({"out": layer.get_output(0), "lse": layer.get_output(1)})
    given = {"outs": torch.randn((3, 9, 4, 64), device="cuda"), "lses": torch.randn((3, 9, 4), device="cuda")}
    out, lse = torch.empty((9, 4, 64), device="cuda"), torch.empty((9, 4), device="cuda")
    executor.run("built", None, given, {"out": out, "lse": lse})
    expected, expected_lse = lse_merge(given["outs"], given["lses"])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_cache_append_in_a_network_writes_the_pool_itself(api: Api, plugins: Any) -> None:
    from splash_plugins.cache_append.reference import append_rows

    built = with_aliases(Built(api))
    inputs = [
        built.input("pool", (-1, 3, 16, 80), "BF16"),
        built.input("rows", (-1, 80), "BF16"),
        built.input("page", (-1,), "INT32"),
        built.input("offset", (-1,), "INT32"),
    ]
    layer = built.network.add_plugin(plugins.cache_append(*inputs, layer=1))
    executor = built.executor({"written": layer.get_output(0)})
    pool = torch.randn((9, 3, 16, 80), device="cuda").bfloat16()
    rows = torch.randn((3, 80), device="cuda").bfloat16()
    page, offset = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([8, -1, 0], [15, 3, 2]))
    expected = pool.clone()
    append_rows(expected[:, 1], rows, page, offset)
    given = {"pool": pool, "rows": rows, "page": page, "offset": offset}
    executor.run("built", None, given, {"written": pool})
    assert torch.equal(pool, expected)


def test_mla_attention_in_a_network(api: Api, plugins: Any) -> None:
    from splash_plugins.mla_attention.decode_reference import decode

    built = Built(api)
    shapes = {"q": (-1, 4, 80), "pool": (-1, 3, 16, 80)}
    inputs = [built.input(name, shape, "BF16") for name, shape in shapes.items()]
    inputs += [built.input("tables", (5, 4), "INT32")]
    inputs += [built.input(name, (-1,), "INT32") for name in ("slot", "first", "length")]
    made = plugins.mla_attention(*inputs, layer=2, stride=1, latent=64, scale=0.125)
    layer = built.network.add_plugin(made)
    executor = built.executor({"out": layer.get_output(0), "lse": layer.get_output(1)})
    given = {
        name: torch.randn([7 if d < 0 else d for d in shape], device="cuda").bfloat16()
        for name, shape in shapes.items()
    }
    lists = {"tables": torch.randint(0, 7, (5, 4)), "slot": [4, 0, 2, 2, 1, 3, 3], "first": [0, 1, 0, 2, 0, 0, 3]}
    lists["length"] = [64, 33, 0, 1, 17, 50, 16]
    given |= {name: torch.as_tensor(x, dtype=torch.int32).cuda() for name, x in lists.items()}
    out = torch.empty((7, 4, 64), dtype=DTYPES["BF16"], device="cuda")
    lse, expected, expected_lse = (
        torch.empty((7, 4), device="cuda"),
        torch.empty_like(out),
        torch.empty((7, 4), device="cuda"),
    )
    executor.run("built", None, given, {"out": out, "lse": lse})
    tensors = [given[name] for name in ("tables", "slot", "first", "length")]
    decode(given["q"], given["pool"][:, 2], *tensors, None, 1, 64, 0.125, expected, expected_lse)
    torch.testing.assert_close(ops.wide(out), ops.wide(expected), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)
