"""TensorRT-LLM's operators against the plain reference and torch, on a Hopper GPU: which are right, and how fast.

Run `python -m perf.trtllm_ops [--headers FOLDER]` on a machine with tensorrt_llm, or with the wheel that has only its
operators. FOLDER holds deep_gemm/*.cuh as in TensorRT-LLM 1.2; without it they are taken from an installed
flashinfer-python. Prints a line for each candidate and shape, and exits with 1 if an operator is missing or disagrees
with its reference. If the FP8 block product does not work, the compiler's messages follow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from splash_engines.operations import Here, fp8_product_of, operations, quantize_blocks
from splash_engines.registry import Dims, Registry, Verdict
from splash_engines.trtllm import Gpu, probe
from splash_engines.trtllm_headers import Headers, find_headers

TOKENS = (1, 4, 16, 64, 256)
GLM = {"hidden": 2048}  # GLM-4.7-Flash
DEEPSEEK = {"hidden": 7168}  # DeepSeek-V3
CASES: dict[str, tuple[Dims, ...]] = {
    "router_product": ({**GLM, "experts": 64}, {**DEEPSEEK, "experts": 256}),
    "fused_a": ({**GLM, "out": 1344}, {**DEEPSEEK, "out": 2112}),
    "indexer_topk": ({"context": 8192, "k": 2048}, {"context": 32768, "k": 2048}),
    "fp8_quantize": ({"inner": 2048}, {"inner": 7168}),
    "fp8_product": ({"inner": 2048, "out": 3072}, {"inner": 7168, "out": 2304}, {"inner": 7168, "out": 4096}),
}


def try_fp8(here: Here, with_headers: bool) -> int:
    """Tries one call of the FP8 block product; returns an exit code. To be run in a process of its own, since the
    product looks for headers only once in a process."""
    operators = [here.trtllm.operator(name) for name in ("fp8_quantize_1x128", "fp8_block_scaling_gemm_impl")]
    if any(isinstance(operator, str) for operator in operators) or (with_headers and isinstance(here.headers, str)):
        print(operators, here.headers)
        return 1
    x = torch.randn((4, 256), device="cuda", dtype=torch.bfloat16)
    weight, scale = quantize_blocks(torch.randn(256, 256, device="cuda"))
    try:
        headers = here.headers if with_headers and isinstance(here.headers, Headers) else None
        y = fp8_product_of(operators[0], operators[1], headers)(x, weight, scale)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"  failed: {str(error).splitlines()[0]}")
        return 1
    print(f"  works, norm {float(y.float().norm()):.1f}")
    return 0


def try_all_ways(options: argparse.Namespace, explain: bool) -> None:
    """Tries the FP8 block product as it is. With `explain`, tries it also with headers, and with nvcc instead of NVRTC,
    and prints what the compiler says."""
    again = [sys.executable, "-m", "perf.trtllm_ops", *(["--headers", str(options.headers)] if options.headers else [])]
    nvcc = {"TRTLLM_DG_JIT_USE_NVCC": "1", "TRTLLM_DG_NVCC_COMPILER": shutil.which("nvcc") or "nvcc"}
    debug = {"TRTLLM_DG_JIT_DEBUG": "1", "TLLM_LOG_LEVEL": "INFO"}
    ways: list[tuple[str, str, dict[str, str]]] = [("FP8 block product as it is", "plain", {})]
    if explain:
        ways += [("with headers, explained", "headers", debug), ("with headers and nvcc", "headers", nvcc | debug)]
    for name, way, env in ways:
        print(name, flush=True)
        subprocess.run([*again, "--try-fp8", way], env={**os.environ, **env}, check=False, timeout=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headers", type=Path, help="folder that holds deep_gemm/")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--try-fp8", choices=["plain", "headers"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpu = Gpu.here()
    folder = options.headers / "deep_gemm" if options.headers else None
    here = Here(gpu, lambda: probe(gpu), lambda: find_headers(folder))
    if options.try_fp8:
        return try_fp8(here, options.try_fp8 == "headers")
    print(f"gpu {gpu}; torch {torch.__version__}; operators {here.trtllm.package}")
    for reason in here.trtllm.reasons:
        print(f"  {reason}")
    print(f"headers {here.headers}")
    try_all_ways(options, explain=False)
    registry = Registry(operations(here), torch.device("cuda" if gpu else "cpu"))
    failed: set[str] = set()
    for name, cases in CASES.items():
        for dims in cases:
            for tokens in options.tokens:
                choice = registry.choose(name, {"tokens": tokens, **dims}, torch.bfloat16)
                for f in choice.findings:
                    took = f"{f.microseconds:9.1f} us" if f.microseconds is not None else " " * 12
                    shape = " ".join(f"{key}={value}" for key, value in dims.items())
                    print(
                        f"{name:15} {shape:28} T={tokens:<4} {f.candidate:34} {f.verdict.value:6} {took} {f.reason}",
                        flush=True,
                    )
                    if f.verdict in (Verdict.WRONG, Verdict.ABSENT):
                        failed.add(name)
    if "fp8_product" in failed:
        try_all_ways(options, explain=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
