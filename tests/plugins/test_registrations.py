"""The plugins' registrations: TensorRT's own Python sources take them, and it would launch what kernels expect."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.layers import BY_NAME, LAYERS_TESTED, Layer, sizes_of

ROOT = Path(__file__).parents[2]
VERSIONS = ("10.14.1.48.post1", "11.4.0.106")
TYPES = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF", "int32": "INT32", "int64": "INT64"}


@pytest.fixture(scope="session")
def sources() -> Path:
    """FOLDER/VERSION/tensorrt_bindings for each version."""
    folder = ROOT / "build" / "tensorrt"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "scripts/tensorrt_sources.sh", str(folder), *VERSIONS], cwd=ROOT, env=env, check=True)
    return folder


def registered(bindings: Path, rows: str, capability: int, cache: Path) -> dict[str, dict[str, Any]]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.plugins.register", str(bindings), rows, str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line["plugin"]: line for line in map(json.loads, done.stdout.splitlines())}


def evaluated(dims: Sequence[int | str], tokens: int) -> list[int]:
    sizes = sizes_of(tokens)
    return [sizes[d] if isinstance(d, str) else d for d in dims]


def check_layer(layer: Layer, found: dict[str, Any], rows: str) -> None:
    types = [rows if dtype == "rows" else dtype for _, dtype in layer.outputs.values()]
    assert found["types"] == [TYPES[t] for t in types]
    assert found["aliases"] == [layer.alias] * len(types)
    for tokens in found["shapes"]:
        assert found["shapes"][tokens] == [evaluated(dims, int(tokens)) for dims, _ in layer.outputs.values()]
    # Inputs, int32 scalars, outputs, and not a pointer more, though Triton appends some.
    scalars = len(found["launches"]["1"]["scalars"])
    pointer, scalar = ["u64", True], ["u32", False]
    assert found["parameters"] == [pointer] * len(layer.inputs) + [scalar] * scalars + [pointer] * len(types)
    assert found["version"] == "8.7"
    assert found["assembler"] == ""


# A version for each GPU: 10.14 is the release that TensorRT-LLM 1.2 was built with.
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("version", "rows", "capability"),
    [
        (VERSIONS[0], "bfloat16", 80),
        (VERSIONS[1], "bfloat16", 90),
        pytest.param(VERSIONS[1], "float16", 120, marks=pytest.mark.nightly),
        pytest.param(VERSIONS[1], "bfloat16", 100, marks=pytest.mark.nightly),
        pytest.param(VERSIONS[0], "float32", 90, marks=pytest.mark.nightly),
    ],
)
def test_every_plugin_is_taken(sources: Path, tmp_path: Path, version: str, rows: str, capability: int) -> None:
    found = registered(sources / version / "tensorrt_bindings", rows, capability, tmp_path)
    assert set(found) == {layer.plugin for layer in LAYERS_TESTED}
    for layer in LAYERS_TESTED:
        check_layer(layer, found[layer.plugin], rows)
    check_launches(found)


def check_launches(found: dict[str, dict[str, Any]]) -> None:
    """Programs follow the tokens of the run, not those of the build."""

    def launch(name: str, tokens: int) -> tuple[list[int], list[int]]:
        got = found[f"splash::{name}"]["launches"][str(tokens)]
        assert got["block"][0] % 32 == 0 and got["block"][1:] == [1, 1]
        return got["grid"], got["scalars"]

    for tokens in (1, 13):
        assert launch("lse_merge", tokens) == ([tokens * 4, 1, 1], [tokens * 4])
        assert launch("cache_append", tokens) == ([tokens, 1, 1], [])
        page = math.prod(evaluated(BY_NAME["page_transfer"].inputs["pool"][0][1:], tokens))
        assert launch("page_transfer", tokens) == ([tokens, -(-page // 4096), 1], [])
        assert launch("mla_attention", tokens) == ([tokens, 1, 1], [4])
        assert launch("mla_prefill", tokens)[1] == [3] and launch("mla_prefill", tokens)[0][0] % (3 * 4) == 0
        assert launch("grouped_experts_up", tokens)[0][1] == 4
        assert launch("grouped_experts_up", tokens)[1] == [2 * tokens]
        assert launch("grouped_experts_down", tokens)[0][1] == tokens
        assert launch("dop_put", tokens) == ([-(-tokens * 320 // 1024), 1, 1], [tokens * 320])
        assert launch("dop_exchange", tokens) == ([64, 1, 1], [max(1, tokens // 2)])
        assert launch("dop_return", tokens) == ([64, 1, 1], [tokens])


PTX = """.version 8.7
.target sm_90a
.visible .entry double(
	.param .u64 .ptr .global .align 1 double_param_0,
	.param .u32 double_param_1,
	.param .u64 .ptr .global .align 1 double_param_2,
	.param .u64 .ptr .global .align 1 double_param_3
)
.reqntid 128
{
	ld.param.b64 	%rd1, [double_param_0];
	ld.param.b64 	%rd2, [double_param_2];
}
"""


def test_hidden_parameters_are_taken_out() -> None:
    from splash_plugins.aot import only_declared, parameters

    assert [name for name, _, _ in parameters(PTX)] == [f"double_param_{i}" for i in range(4)]
    bare = only_declared(PTX, ["*fp32", "i32", "*fp32"])
    assert [name for name, _, _ in parameters(bare)] == [f"double_param_{i}" for i in range(3)]
    assert bare.splitlines()[-4:] == PTX.splitlines()[-4:]


def test_a_kernel_that_reads_hidden_memory_is_refused() -> None:
    from splash_plugins.aot import only_declared

    with pytest.raises(ValueError, match="double reads double_param_2"):
        only_declared(PTX, ["*fp32", "i32"])


@pytest.mark.parametrize("types", [["*fp32", "*fp32", "*fp32"], ["i32", "i32", "*fp32"], ["*fp32", "i32", "i32"]])
def test_other_types_than_declared_are_a_bug(types: list[str]) -> None:
    from splash_plugins.aot import only_declared

    with pytest.raises(AssertionError):
        only_declared(PTX, types)


def test_without_tensorrt_it_says_so() -> None:
    program = "from splash_plugins import aot, registrations as r; r.register_all(aot.target_of((9, 0)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "ValueError: plugins need full TensorRT, which does not load" in done.stderr
