"""TensorRT-LLM's operators are looked for; if they are not used, a reason is given."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from splash_engines import operations
from splash_engines.inspect_operations import DEEPSEEK_EXPERTS, DEEPSEEK_V3_2, format_operations, sizes_of
from splash_engines.kernels_reference import REFERENCE
from splash_engines.operations import Here
from splash_engines.trtllm import Gpu, Trtllm, numbers_of, probe
from splash_engines.trtllm_headers import CUDA_HEADERS, Headers, LaidOut, find_headers
from splash_trt import environment
from splash_trt.commands.engines import inspect_command
from splash_trt.models.families import load_config

HOPPER = Gpu("NVIDIA H200", (9, 0))
BLACKWELL = Gpu("NVIDIA B200", (10, 0))
SEPARATE = "tokenspeed-trtllm-kernel"
ROOT = Path(__file__).parents[2]


class Installed:
    """What is installed, by distribution; modules in `broken` raise when they are imported."""

    def __init__(self, versions: Mapping[str, str], broken: Mapping[str, Exception] | None = None) -> None:
        self.versions = versions
        self.broken = broken or {}
        self.loaded: list[str] = []

    def version(self, name: str) -> str:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.versions[name]

    def load(self, module: str) -> Any:
        if module in self.broken:
            raise self.broken[module]
        self.loaded.append(module)

    def probe(self, gpu: Gpu | None) -> Trtllm:
        return probe(gpu, self.version, self.load)


def test_its_own_package_comes_first() -> None:
    both = Installed({"tensorrt_llm": "1.2.1", SEPARATE: "1.2.1.post20260427"})
    found = both.probe(HOPPER)
    assert found.package == "tensorrt_llm 1.2.1" and found.has_headers and both.loaded == ["tensorrt_llm"]


def test_then_the_wheel_with_nothing_else() -> None:
    old = Installed({"tensorrt_llm": "1.1.0", SEPARATE: "1.2.1.post20260427"})
    found = old.probe(HOPPER)
    assert found.package == f"{SEPARATE} 1.2.1.post20260427" and not found.has_headers
    assert old.loaded == ["trtllm_kernel"]
    assert found.reasons == (
        "tensorrt_llm: 1.1.0 is older than 1.2 (install tensorrt-llm==1.2.1 from NVIDIA's package index)",
    )


def test_then_none_with_both_reasons() -> None:
    found = Installed({}).probe(HOPPER)
    assert found.package is None
    assert [r.split(":")[0] for r in found.reasons] == ["tensorrt_llm", SEPARATE]
    assert all("not installed (" in r for r in found.reasons)
    assert found.operator("dsv3_router_gemm_op") == "TensorRT-LLM's operators are not here"


def test_nothing_is_imported_without_a_gpu() -> None:
    both = Installed({"tensorrt_llm": "1.2.1", SEPARATE: "1.2.1.post20260427"})
    found = both.probe(None)
    assert found.package is None and both.loaded == []
    assert all("needs an NVIDIA GPU, and this machine has none" in reason for reason in found.reasons)


def test_a_placeholder_that_refuses_to_be_imported_is_passed_over() -> None:
    error = RuntimeError("This is a placeholder;\n install from NVIDIA's index")
    found = Installed({"tensorrt_llm": "1.2.1"}, {"tensorrt_llm": error}).probe(HOPPER)
    assert found.reasons[0] == "tensorrt_llm: 1.2.1 does not load: This is a placeholder; install from NVIDIA's index"
    missing = OSError("libcublas.so.13: cannot open shared object file")
    found = Installed({SEPARATE: "1.2.1"}, {"trtllm_kernel": missing}).probe(HOPPER)
    assert "libcublas.so.13" in found.reasons[1]


def test_a_release_without_kernels_for_hopper_is_not_loaded_there() -> None:
    newer = Installed({SEPARATE: "1.3.0.post20260803"})
    assert "has no kernels for NVIDIA H200" in newer.probe(HOPPER).reasons[1] and newer.loaded == []
    assert newer.probe(BLACKWELL).package == f"{SEPARATE} 1.3.0.post20260803"


@pytest.mark.parametrize(
    ("version", "numbers"), [("1.2.1.post20260427", (1, 2, 1)), ("1.2.0rc3", (1, 2, 0)), ("10.14", (10, 14)), ("x", ())]
)
def test_versions_are_read(version: str, numbers: tuple[int, ...]) -> None:
    assert numbers_of(version) == numbers


def headers_in(folder: Path) -> Headers:
    for name in ("deep_gemm/fp8_gemm_impl.cuh", *(f"cuda/{name}" for name in CUDA_HEADERS)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}", encoding="utf-8")
    return Headers(folder / "deep_gemm", folder / "cuda")


def test_headers_lie_where_the_product_looks_for_them(tmp_path: Path) -> None:
    """It asks a shell for `pip show tensorrt_llm`, and takes the folder of the line that begins with Location."""
    laid_out = LaidOut(headers_in(tmp_path / "a folder"))
    with environment.first_on_path(laid_out.programs):
        said = subprocess.run("pip show tensorrt_llm 2>/dev/null", shell=True, capture_output=True, text=True).stdout
    assert said.startswith("Location: ") and said.count("\n") == 1
    include = Path(said.removeprefix("Location: ").rstrip()) / "tensorrt_llm" / "include"
    assert (include / "deep_gemm" / "fp8_gemm_impl.cuh").read_text() == "// deep_gemm/fp8_gemm_impl.cuh"
    assert (include / "cuda" / "include" / "cuda_fp8.h").read_text() == "// cuda/cuda_fp8.h"
    after = environment.search_path() or ""
    assert str(laid_out.programs) not in after


def test_headers_are_found_in_packages_or_missed_with_a_remedy(tmp_path: Path) -> None:
    headers = headers_in(tmp_path)
    places = {"flashinfer-python": headers.deep_gemm, "nvidia-cuda-runtime": headers.cuda}
    assert find_headers(file_of=lambda name, path: places.get(name)) == headers
    assert find_headers(headers.deep_gemm, headers.cuda, lambda name, path: None) == headers
    reason = find_headers(file_of=lambda name, path: None)
    assert isinstance(reason, str) and "pip install --no-deps flashinfer-python" in reason


def test_the_path_is_as_before_even_after_a_failure(tmp_path: Path) -> None:
    before = environment.search_path()
    with pytest.raises(RuntimeError), environment.first_on_path(tmp_path):
        assert (environment.search_path() or "").split(":")[0] == str(tmp_path)
        raise RuntimeError
    assert environment.search_path() == before


def here() -> Here:
    return Here(None, lambda: Installed({}).probe(None), lambda: "no headers")


def test_the_list_tells_of_each_operation_what_is_used_and_why() -> None:
    text = format_operations(here(), REFERENCE, DEEPSEEK_V3_2, DEEPSEEK_EXPERTS, tokens=2)
    assert text.startswith(
        "2 tokens, bfloat16, on a CPU\nTensorRT-LLM's operators: none\n  tensorrt_llm: not installed"
    )
    *blocks, program = text.split("\n\n")[1:]
    assert [b.split(" ")[0] for b in blocks] == list(DEEPSEEK_V3_2)
    for block in blocks:
        lines = [line.split(maxsplit=2) for line in block.splitlines()[1:]]
        assert [words[0] for words in lines if words[1] == "used"] == ["torch"]
        assert all(words[1] == "absent" and "are not here" in words[2] for words in lines if "trtllm" in words[0])
    assert max(map(len, text.splitlines())) <= 120
    assert [line.split(maxsplit=5)[:5] for line in program.splitlines()[1:] if line[2] != " "] == [
        ["project_in", "1-16", "own", "trtllm.dsv3_fused_a_gemm_op", "is"],
        ["project_in", "32", "own", "trtllm.dsv3_fused_a_gemm_op", "is"],
        ["route", "1-16", "own", "trtllm.dsv3_router_gemm_op", "is"],
        ["route", "32", "own", "trtllm.dsv3_router_gemm_op", "is"],
    ]


def test_a_model_has_the_operations_of_its_own_sizes() -> None:
    model = load_config(ROOT / "models" / "splash-tiny")
    sizes = sizes_of(model)
    assert sizes["router_product"] == {"hidden": 256, "experts": 16} and "indexer_topk" not in sizes
    assert "indexer_topk: not in this model" in format_operations(here(), REFERENCE, sizes, model.experts, tokens=2)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "this_machine", here)
    done = CliRunner().invoke(inspect_command, ["--ops", "--tokens", "3"])
    assert done.exit_code == 0 and done.output.startswith("3 tokens, bfloat16, on a CPU")
    done = CliRunner().invoke(inspect_command, [])
    assert done.exit_code == 2 and "Missing argument 'ENGINE'" in done.output
    done = CliRunner().invoke(inspect_command, ["/nowhere", "--ops"])
    assert done.exit_code != 0 and "/nowhere" in done.output


def test_the_probe_of_this_process_loads_nothing_without_a_gpu() -> None:
    if Gpu.here() is None:
        operations.this_machine().trtllm.operator("dsv3_router_gemm_op")
        assert not {"tensorrt_llm", "trtllm_kernel"} & set(sys.modules)
