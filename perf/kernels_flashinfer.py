"""FlashInfer's kernels beside ours on a Hopper GPU, on the same inputs: `python -m perf.kernels_flashinfer`.

Measures decode attention over paged latent rows, prefill attention of whole prompts, and routed experts, all in
bfloat16. Both sides are first compared with the plain torch reference, into outputs full of NaN; a wrong result makes
the exit code 1. Times are of CUDA graphs, without planning and compiling.

Both sides do the same work. Decode is attention to latent rows with its log-sum-exp, without the absorbing product
before it and the value up-projection after it, for which FlashInfer has no kernel. FlashInfer's prefill needs keys in
one piece; it is timed without and with the copy that makes them so, while ours reads nope and rope parts where they
lie. FlashInfer's experts add no other tensor to the sum, so ours do not either. Both take all 64 experts, whole ones
and ones that are cut inside over two ranks; FlashInfer is timed as it comes, and with the kernels that its autotuner
chooses for the exact number of tokens.

FlashInfer compiles its modules when they are first used. Here all are compiled at once, in separate processes, beside
ours; what is not compiled in time is left out. Each part runs in a process of its own too: one that crashes or hangs is
named.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from perf import expert_cases
from perf.decode_cases import LATENT, ROPE, SCALE, WIDTH, Attention, Checks, attention, attention_wanted, time_us
from perf.expert_cases import GLM, GLM_INSIDE
from perf.gpu_measure import error
from perf.kernels_prefill import FLASH, V3, Case, hopper_way, make_case
from perf.kernels_prefill import Checks as PrefillChecks
from splash_plugins.grouped_experts import reference
from splash_plugins.grouped_experts.kernel import grouped_experts
from splash_plugins.mla_attention.decode_kernel import decode

REMEDY = "kernels_flashinfer needs FlashInfer: python -m pip install flashinfer-python"
HEADS = (10, 20, 64, 128)
CONTEXTS = ((1, 600), (1, 15000), (16, 600), (64, 640), (128, 600), (512, 640))  # (queries, tokens of each)
PROMPTS = {
    "ragged_256": (("1 x 8192, h 10", 8192, 10, FLASH), ("1 x 15000, h 10", 15000, 10, FLASH)),
    "ragged_192": (("1 x 8192, h 64, v3", 8192, 64, V3),),
}
TOKENS = (16, 128, 8192)
SHAPES = (replace(GLM, name="glm-4.7-flash whole", local=64), GLM_INSIDE)
WORKSPACE_BYTES = 256 << 20
BF16 = torch.bfloat16
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError)


def flashinfer(module: str = "") -> Any:
    return importlib.import_module("flashinfer" + module)


def module(name: str) -> Any:
    """FlashInfer's build specification of one of its modules, made as by its own wrappers."""
    attention_modules = flashinfer(".jit.attention.modules")
    if name.startswith("mla_"):
        return attention_modules.gen_batch_mla_module(name[4:], BF16, BF16, BF16, torch.int32, LATENT, ROPE, False)
    if name == "experts":
        return flashinfer(".jit.fused_moe").gen_cutlass_fused_moe_sm90_module()
    nope, rope, vd = PROMPTS[name][0][3]
    dims = (nope + rope, vd, 0, False, False, False)
    return attention_modules.gen_batch_prefill_module("fa3", BF16, BF16, BF16, torch.int32, *dims)


def workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def attempt(label: str, measure: Callable[..., str], *arguments: Any) -> None:
    """Prints one line: what `measure` returns, or why it failed."""
    try:
        said = measure(*arguments)
    except FAILURES as reason:
        words = str(reason).strip().splitlines() or [""]
        said = f"{type(reason).__name__}: {words[0][:120]} {words[-1][:120] if len(words) > 1 else ''}"
    print(f"{label}: {said}", flush=True)


# Decode.


def our_decode(case: Attention) -> Callable[[int], None]:
    return lambda layer: case.run(decode, layer)


def their_decode(case: Attention, backend: str) -> Callable[[int], None]:
    """FlashInfer's decode: a function that runs a layer, into the case's outputs."""
    wrapper = flashinfer(".mla").BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
    queries, heads = case.q.shape[:2]
    page_tokens, context = case.layers[0].shape[1], int(case.length[0])
    used = -(-context // page_tokens)
    begin = torch.arange(queries + 1, dtype=torch.int32)
    pages = case.tables[:, :used].flatten().contiguous()
    index = (begin, begin * used, pages, case.length.cpu(), heads, LATENT, ROPE, page_tokens)
    wrapper.plan(*index, False, SCALE, BF16, BF16)
    q, q_rope = case.q[..., :LATENT], case.q[..., LATENT:]
    options = {"out": case.out, "lse": case.lse, "return_lse": True, "return_lse_base_on_e": True}

    def run(layer: int) -> None:
        rows = case.layers[layer]
        wrapper.run(q, q_rope, rows[..., :LATENT], rows[..., LATENT:], **options)

    return run


def measure_decode(checks: Checks, case: Attention, want: tuple[torch.Tensor, torch.Tensor], name: str) -> str:
    run = our_decode(case) if name == "ours" else their_decode(case, name)
    case.out.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    run(0)
    checks.see(f"{name} {tuple(case.q.shape)}", BF16, ((case.out, want[0]), (case.lse, want[1])))
    off = error(case.out, want[0])
    us = time_us([partial(run, layer) for layer in range(len(case.layers))])
    rate = float(case.length.sum()) * WIDTH * 2 / us / 1e3
    return f"{us:8.1f} us {rate:6.0f} GB/s, error {off:.1e}"


def decode_shape(checks: Checks, heads: int, queries: int, context: int, backends: Sequence[str]) -> None:
    # So many layers that the L2 cache does not hold them.
    layers = max(8, min(256, int(300e6 / (queries * context * WIDTH * 2))))
    case = attention([context] * queries, heads, BF16, layers)
    want = attention_wanted(case)
    for name in ("ours", *backends):
        label = f"decode h {heads} A {queries} context {context}"
        attempt(f"{label:34} {name:4}", measure_decode, checks, case, want, name)


def time_decode(names: Sequence[str]) -> int:
    checks = Checks()
    for heads, (queries, context) in itertools.product(HEADS, CONTEXTS):
        decode_shape(checks, heads, queries, context, [name[4:] for name in names])
        torch.cuda.empty_cache()
    return checks.failed


# Prefill.


def keys_of(case: Case) -> torch.Tensor:
    rope = case.rows[:, None, LATENT:].expand(-1, case.k_nope.shape[1], -1)
    return torch.cat([case.k_nope, rope], -1)


def their_prefill(case: Case) -> Callable[[torch.Tensor], None]:
    """FlashInfer's prefill: a function that runs it on given keys, into the case's outputs; log-sum-exps to base 2."""
    wrapper = flashinfer(".prefill").BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend="fa3")
    (tokens, heads, dim), vd = case.q.shape, case.v.shape[2]
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    types = {"q_data_type": BF16, "kv_data_type": BF16}
    wrapper.plan(ends, ends, heads, heads, dim, vd, causal=True, sm_scale=case.scale, **types)
    options = {"out": case.out, "lse": case.lse, "return_lse": True}
    return lambda keys: wrapper.run(case.q, keys, case.v, **options)


def measure_prefill(checks: PrefillChecks, case: Case, name: str) -> str:
    launch: Callable[[], object]
    if name == "ours":
        launch = partial(hopper_way(), case, False)
    else:
        run, keys = their_prefill(case), keys_of(case)
        launch = partial(run, keys) if name == "fa3" else lambda: run(keys_of(case))
    case.out.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    launch()
    if name != "ours":
        case.lse.mul_(math.log(2))
    checks.spots(name, case)
    us = time_us([launch], replays=9)
    return f"{us / 1e3:8.3f} ms {case.flops() / us / 1e6:6.0f} TFLOP/s"


def time_prefill(names: Sequence[str]) -> int:
    checks = PrefillChecks()
    for name, prompts in PROMPTS.items():
        for label, tokens, heads, dims in prompts:
            case = make_case(label, [(tokens, tokens)], heads, dims, BF16)
            for way in ("ours", *(("fa3", "fa3 with keys") if name in names else ())):
                attempt(f"prefill {label:19} {way:13}", measure_prefill, checks, case, way)
    return checks.failed


# Experts.


def our_experts(case: expert_cases.Case) -> Callable[[int], None]:
    def run(i: int) -> None:
        routed = (case.x[i], case.choice[i], case.weight[i])
        grouped_experts(*routed, case.gate_up, case.down, 0, None, case.out, all_here=True)

    return run


def their_experts(case: expert_cases.Case, up_gate: torch.Tensor, tuned: bool) -> Callable[[int], None]:
    fused_moe, autotune = flashinfer(".fused_moe").cutlass_fused_moe, flashinfer().autotune

    def run(i: int) -> None:
        routed = (case.x[i], case.choice[i], case.weight[i], up_gate, case.down, BF16)
        fused_moe(*routed, quant_scales=None, output=case.out, tune_max_num_tokens=max(TOKENS))

    def launch(i: int) -> None:
        with autotune(False, tuning_buckets=(case.tokens,)):
            run(i)

    if not tuned:
        return run
    with autotune(True, tuning_buckets=(case.tokens,)):
        run(0)
    return launch


def measure_experts(checks: expert_cases.Checks, case: expert_cases.Case, up_gate: torch.Tensor, name: str) -> str:
    want = torch.empty_like(case.out)
    reference.sum_of_experts(*case.arguments(0)[:-2], None, want)
    run = our_experts(case) if name == "ours" else their_experts(case, up_gate, name == "autotuned")
    case.out.fill_(torch.nan)
    run(0)
    checks.see(f"{case.shape.name} T {case.tokens} {name}", case.out, want, expert_cases.TOLERANCE[BF16])
    us = expert_cases.time_us([partial(run, i) for i in range(case.sets)])
    num = 6 * case.shape.hidden * case.shape.inner  # bytes of an expert; operations of a pair
    return f"{us:8.1f} us {case.hit() * num / us / 1e3:6.0f} GB/s {case.pairs() * num / us / 1e6:5.0f} TFLOP/s"


def experts_shape(checks: expert_cases.Checks, shape: expert_cases.Shape, with_theirs: bool) -> None:
    gate_up, down = expert_cases.weights(shape, BF16)
    up_gate = gate_up.roll(shape.inner, 1)  # FlashInfer expects up before gate
    for tokens in TOKENS:
        sets = 8 if tokens <= 64 else 3 if tokens <= 2048 else 1
        case = expert_cases.Case(shape, tokens, gate_up, down, sets)
        for name in ("ours", *(("as it comes", "autotuned") if with_theirs else ())):
            label = f"experts {shape.name} T {tokens}"
            attempt(f"{label:42} {name:11}", measure_experts, checks, case, up_gate, name)


def time_experts(names: Sequence[str]) -> int:
    checks = expert_cases.Checks()
    for shape in SHAPES:
        experts_shape(checks, shape, "experts" in names)
        torch.cuda.empty_cache()
    return checks.failed


# Compiling, and the processes.


def warm(name: str) -> None:
    """Compiles a module of FlashInfer, or our kernels for a case that is timed, into the caches on disk."""
    what, _, rest = name.partition(":")
    if what == "module":
        module(rest).build_and_load()
    elif what == "decode":
        heads, queries, context = map(int, rest.split(","))
        case = attention([context] * queries, heads, BF16, 1)
        case.run(decode)
    elif what == "prefill":
        label, tokens, heads, dims = PROMPTS[rest][0]
        hopper_way()(make_case(label, [(256, 256)], heads, dims, BF16), False)
    else:
        shape, tokens = SHAPES[int(rest.split(",")[0])], int(rest.split(",")[1])
        our_experts(expert_cases.Case(shape, tokens, *expert_cases.weights(shape, BF16), sets=1))(0)
    torch.cuda.synchronize()


def child(*flags: str, quiet: bool) -> subprocess.Popen[str]:
    output = subprocess.PIPE if quiet else None
    command = [sys.executable, "-m", "perf.kernels_flashinfer", *flags]
    return subprocess.Popen(
        command, stdout=output, stderr=output and subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int | None, str]:
    """Waits for a process. Returns its exit code, or None if it was not done in time and was killed with all that it
    had started; and its last words."""
    try:
        said = process.communicate(timeout=max(0.1, seconds))[0] or ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, "not done in time"
    lines = [line for line in said.splitlines() if line.strip()]
    return process.returncode, next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")


PARTS: dict[str, tuple[Callable[[Sequence[str]], int], tuple[str, ...]]] = {
    "decode": (time_decode, ("mla_fa3", "mla_fa2")),
    "prefill": (time_prefill, tuple(PROMPTS)),
    "experts": (time_experts, ("experts",)),
}


def jobs(parts: list[str]) -> list[str]:
    found = [f"module:{name}" for part in parts for name in PARTS[part][1]]
    if "decode" in parts:
        found += [f"decode:{heads},{queries},{context}" for heads in HEADS for queries, context in CONTEXTS]
    if "prefill" in parts:
        found += [f"prefill:{name}" for name in PROMPTS]
    if "experts" in parts:
        found += [f"experts:{i},{tokens}" for i in range(len(SHAPES)) for tokens in TOKENS]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=160, help="time limit for everything")
    parser.add_argument("--compile-seconds", type=float, default=80, help="time limit for compiling, part of --seconds")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--modules", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("flashinfer") is None:
        print(REMEDY)
        return 2
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("kernels_flashinfer needs a Hopper GPU (H100, H200): its prefill and expert kernels are made for one")
        return 2
    if options.warm:
        warm(options.warm)
        return 0
    if options.modules is not None:
        torch.manual_seed(time.time_ns())
        return min(1, PARTS[options.parts[0]][0](options.modules))
    return run_parts(options.parts, options.seconds, options.compile_seconds)


def run_parts(parts: list[str], seconds: float, compile_seconds: float) -> int:
    begin = time.perf_counter()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flashinfer {flashinfer().__version__}", flush=True
    )
    started = {job: child("--warm", job, quiet=True) for job in jobs(parts)}
    built, failed = set(), False
    for job, process in started.items():
        code, words = ended(process, begin + compile_seconds - time.perf_counter())
        if code == 0:
            built.add(job)
        else:
            failed |= not job.startswith("module:")
            print(f"NOT COMPILED {job}: {words[:300]}")
    print(f"compiled {len(built)} of {len(started)} after {time.perf_counter() - begin:.0f} s", flush=True)
    for part in parts:
        names = [name for name in PARTS[part][1] if f"module:{name}" in built]
        code, words = ended(
            child("--parts", part, "--modules", *names, quiet=False), begin + seconds - time.perf_counter()
        )
        failed |= code != 0
        if code != 0:
            print(f"{part}: {'wrong' if code == 1 else f'ended with {code}'} {words}")
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
