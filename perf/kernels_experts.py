"""Checks and times the routed experts, the activation and the embedding: `python -m perf.kernels_experts`.

With `--hopper`, only the routed experts' kernel for Hopper (experts_hopper.py); with `--cuts`, both ways of cutting
experts over two ranks, side by side (experts_cuts.py).

T tokens, k choices a token, E experts of which E_r are on this rank, D hidden, I intermediate. Every kernel, and every
tile that is timed, is first compared with the plain torch reference, on fresh random numbers and into outputs full of
NaN. A wrong result makes the exit code 1. Times are medians over replays of a CUDA graph of several launches, each with
different tokens.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from perf import experts_cuts, experts_hopper
from perf.expert_cases import GLM, GPU, SLICE, TINY, Case, Checks, Shape, time_us, weights
from splash_plugins import overlap_kernel
from splash_plugins.embed import reference as embed_reference
from splash_plugins.embed.kernel import embed
from splash_plugins.grouped_experts import torch_kernel
from splash_plugins.grouped_experts.device import limits
from splash_plugins.grouped_experts.kernel import grouped_experts
from splash_plugins.grouped_experts.tiles import FEW_PAIRS, Plan, Tiles, fit
from splash_plugins.silu_mul import reference as silu_reference
from splash_plugins.silu_mul.kernel import silu_mul

BANDWIDTH = 4.3e12  # bytes/s that a copy reaches on an H200
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SLICE_TOKENS = (1, 16, 128, 1024)
BUDGET_S = 85  # no new sweep begins after this many seconds
COMPILERS = 14


FEW_GATE = ((16, 128, 2, 5), (16, 256, 2, 4), (32, 128, 2, 5), (32, 128, 4, 3), (32, 128, 4, 5), (32, 256, 4, 2),
            (32, 256, 4, 3), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 8, 3))  # fmt: skip
FEW_DOWN = ((16, 128, 2, 5), (16, 256, 2, 4), (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4),
            (64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3), (128, 64, 4, 5))  # fmt: skip
GATE = {
    16: ((32, 128, 4, 4, 2), (32, 256, 4, 3, 2), (64, 128, 4, 3, 2), (64, 64, 4, 5, 2), (64, 128, 8, 4, 1)),
    32: ((32, 128, 4, 4, 2), (64, 128, 4, 3, 2), (64, 64, 4, 4, 2), (64, 128, 8, 4, 1)),
    64: ((32, 128, 4, 4, 2), (64, 64, 4, 4, 2), (64, 128, 4, 4, 1), (128, 64, 8, 4, 1), (128, 64, 4, 3, 1)),
    128: ((64, 64, 4, 4, 1), (64, 64, 8, 3, 2), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1)),
}
DOWN = {
    16: ((64, 128, 4, 4, 2), (64, 256, 4, 3, 2), (128, 64, 4, 5, 2), (128, 128, 4, 3, 2)),
    32: ((64, 128, 4, 4, 2), (128, 64, 4, 4, 2), (128, 128, 4, 4, 1)),
    64: ((64, 128, 4, 4, 2), (128, 64, 4, 4, 2), (128, 128, 4, 4, 1), (256, 64, 8, 4, 1)),
    128: ((128, 64, 4, 4, 1), (128, 64, 8, 3, 2), (256, 64, 8, 3, 1), (256, 64, 8, 4, 1)),
}


def few_tiles(rows: Sequence[tuple[int, int, int, int]]) -> list[Tiles]:
    plain = [Tiles(m=16, n=n, k=k, warps=warps, stages=stages) for n, k, warps, stages in rows]
    return [replace(t, tma=tma) for t in plain for tma in (False, True)]


def many_tiles(m: int, rows: Sequence[tuple[int, int, int, int, int]]) -> list[Tiles]:
    plain = [Tiles(m=m, n=n, k=k, warps=w, stages=s, per_processor=per) for n, k, w, s, per in rows]
    return [replace(t, tma=tma) for t in plain for tma in (False, True)]


@dataclass(frozen=True)
class Mode:
    """A way of computing, and the tiles to try for the first and for the second product."""

    few: bool
    gate_up: tuple[Tiles, ...]
    down: tuple[Tiles, ...]


def modes(shape: Shape, num_tokens: int) -> Iterator[Mode]:
    """What is worth trying for this number of tokens; shapes other than GLM get a shorter list."""
    pairs, short = num_tokens * shape.top_k, shape is not GLM
    device = limits(GPU)

    def fitted(first: list[Tiles], second: list[Tiles]) -> tuple[tuple[Tiles, ...], tuple[Tiles, ...]]:
        if short:
            first, second = first[::3], second[::3]
        gate = dict.fromkeys(fit(t, 2, shape.hidden, shape.inner, 2, device) for t in first)
        return tuple(gate), tuple(dict.fromkeys(fit(t, 1, shape.inner, shape.hidden, 2, device) for t in second))

    few = few_tiles(FEW_GATE), few_tiles(FEW_DOWN)
    if pairs <= FEW_PAIRS:
        yield Mode(True, *fitted(*few))
    per_expert = pairs / shape.local / 2
    for m in (16, 32, 64, 128):
        low, high = {16: (2, 24), 32: (8, 48), 64: (12, 160), 128: (32, 1 << 30)}[m]
        if low <= per_expert <= high:
            yield Mode(False, *fitted(many_tiles(m, GATE[m]), many_tiles(m, DOWN[m])))


def check_experts(checks: Checks) -> None:
    for dtype, shape in ((torch.bfloat16, GLM), (torch.float16, TINY), (torch.float32, TINY)):
        tensors = weights(shape, dtype)
        for tokens in (1, 3, 16, 65, 200, 1000, 4000) if shape is GLM else (3, 300):
            case = Case(shape, tokens, *tensors, sets=1)
            case.choice[0][tokens - tokens // 4 :] = -1
            want = case.wanted()
            checks.experts(str(dtype), case, grouped_experts, want)
            if torch_kernel.is_supported(*tensors):
                checks.experts("torch", case, torch_kernel.grouped_experts, want)
            case.choice[0].fill_(-1)
            checks.experts("nobody here", case, grouped_experts, case.addend)
            if tokens <= 1000:
                case.choice[0][:, 0] = 5
                checks.experts("one expert", case, grouped_experts, case.wanted())


def rows_inputs(tokens: int) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Arguments of embed, as for glm-4.7-flash on one of two ranks; and of silu_mul, as for a shared expert."""
    ids = torch.randint(-1, 154880, (tokens,), dtype=torch.int32, device=GPU)
    slot = torch.randint(-1, 512, (tokens,), dtype=torch.int32, device=GPU)
    last = torch.randint(0, 154880, (512,), device=GPU)
    table = torch.randn(77440, 2048, device=GPU, dtype=torch.bfloat16)
    out = torch.full((tokens, 2048), torch.nan, device=GPU, dtype=torch.bfloat16)
    return (ids, slot, last, table, 77440, out), torch.randn(tokens, 1536, device=GPU, dtype=torch.bfloat16)


def check_and_time_rows(checks: Checks) -> None:
    for tokens in (1, 64, 512, 16384):
        arguments, gate_up = rows_inputs(tokens)
        embed(*arguments)
        want = torch.empty_like(arguments[-1])
        embed_reference.embed(*arguments[:-1], want)
        checks.see(f"embed T {tokens}", arguments[-1], want, 0.0)
        checks.see(f"silu_mul T {tokens}", silu_mul(gate_up), silu_reference.silu_mul(gate_up), 3e-3)
        us = time_us([lambda: embed(*arguments)] * 10), time_us([lambda: silu_mul(gate_up)] * 10)  # noqa: B023
        print(f"embed T {tokens:5} {us[0]:7.1f} us   silu_mul {us[1]:7.1f} us")


def tile_name(t: Tiles) -> str:
    return f"{t.m}x{t.n}x{t.k} w{t.warps} s{t.stages} p{t.per_processor} g{t.group}" + (" tma" if t.tma else "")


def sweep(checks: Checks, case: Case, deadline: float) -> None:
    """Tries each mode's tiles, for one product after the other; prints the best of each mode and of all."""
    shape, tokens = case.shape, case.tokens
    want = case.wanted()
    best: tuple[float, str] = (float("inf"), "")

    def measure(what: str, run: Callable[..., None]) -> float:
        try:
            checks.experts(what, case, run, want)
        except OutOfResources as error:
            print(f"{what}: {error}", flush=True)
            return float("inf")
        launches = [lambda i=i: run(*case.arguments(i)) for i in range(case.sets)]
        return time_us(launches)

    def planned(plan: Plan) -> float:
        return measure(str(plan), lambda *a: grouped_experts(*a, plan=plan))

    results = []
    chosen = measure("as chosen", grouped_experts)
    if tokens <= 16:
        one_by_one = alone(lambda: measure("as chosen", grouped_experts))
        results.append(f"{chosen:8.1f} us  as chosen; {one_by_one:.1f} us without overlap")
    for mode in modes(shape, tokens):
        if time.perf_counter() > deadline:
            results.append("(out of time)")
            break
        plan = Plan(few=mode.few, gate_up=mode.gate_up[0], down=mode.down[0])
        plan = min((replace(plan, gate_up=t) for t in mode.gate_up), key=planned)
        timed = [(planned(p), p) for p in (replace(plan, down=t) for t in mode.down)]
        us, plan = min(timed, key=lambda pair: pair[0])
        if not mode.few and plan.gate_up.m >= 64:
            for group in (2, 32):
                other = replace(plan, gate_up=replace(plan.gate_up, group=group), down=replace(plan.down, group=group))
                us, plan = min((us, plan), (planned(other), other), key=lambda pair: pair[0])
        name = "few" if mode.few else "sorted"
        text = f"{name} {tile_name(plan.gate_up)} | {tile_name(plan.down)}"
        results.append(f"{us:8.1f} us  {text}")
        best = min(best, (us, text))
    if torch_kernel.is_supported(case.gate_up, case.down) and tokens >= 256:
        us = measure("torch", torch_kernel.grouped_experts)
        results.append(f"{us:8.1f} us  torch.nn.functional.grouped_mm")
        best = min(best, (us, "torch"))
    print_row(case, best, chosen)
    print("".join(f"      {line}\n" for line in results), end="", flush=True)


def alone(measure: Callable[[], float]) -> float:
    """`measure` without overlapping launches."""
    overlap_kernel.BY_DEFAULT = False
    us = measure()
    overlap_kernel.BY_DEFAULT = True
    return us


def print_row(case: Case, best: tuple[float, str], chosen: float) -> None:
    cost = 3 * case.shape.hidden * case.shape.inner
    hit, pairs = case.hit(), case.pairs()
    rate = hit * cost * 2 / (best[0] * 1e-6)
    print(
        f"{case.shape.name} T {case.tokens:5}: best {best[0]:7.1f} us (as chosen {chosen:7.1f}), {hit:4.1f} hit,"
        f" {rate / 1e9:6.0f} GB/s = {rate / BANDWIDTH:4.0%}, {pairs * cost * 2 / best[0] / 1e6:5.0f} TFLOP/s"
        f"  <- {best[1]}",
        flush=True,
    )


Job = tuple[Shape, int, Plan | None, torch.dtype]


def jobs() -> list[Job]:
    """Everything that the sweeps launch, each kernel once."""
    found: dict[Job, None] = {}
    for shape, counts in ((GLM, TOKENS), (SLICE, SLICE_TOKENS)):
        for tokens in counts:
            for mode in modes(shape, tokens):
                # One number of tokens for all whose pairs take the same kernels.
                few = (4 if shape is GLM and tokens < 4 else tokens) if mode.few else 512
                pairs = itertools.zip_longest(mode.gate_up, mode.down)
                for gate_up, down in pairs:
                    plan = Plan(
                        few=mode.few,
                        gate_up=gate_up or mode.gate_up[-1],
                        down=down or mode.down[-1],
                    )
                    found[(shape, few, plan, torch.bfloat16)] = None
        found.update({(shape, tokens, None, torch.bfloat16): None for tokens in (1, 16, 64, 65, 300, 700, 1000, 4000)})
    found.update({(TINY, tokens, None, d): None for tokens in (3, 300) for d in (torch.float16, torch.float32)})
    return list(found)


def compile_in_child(job: Job) -> None:
    """Puts the kernels into Triton's cache on disk, by a launch in which no expert is chosen."""
    shape, tokens, plan, dtype = job
    # The weights are never read; only their sizes matter.
    gate_up = torch.empty(shape.local, 2 * shape.inner, shape.hidden, device=GPU, dtype=dtype)
    down = torch.empty(shape.local, shape.hidden, shape.inner, device=GPU, dtype=dtype)
    case = Case(shape, tokens, gate_up, down, sets=1, first=1 << 20)
    try:
        grouped_experts(*case.arguments(0), plan=plan)
    except OutOfResources:
        pass
    torch.cuda.synchronize()


def main() -> int:
    if "--hopper" in sys.argv[1:]:
        return experts_hopper.main()
    if "--cuts" in sys.argv[1:]:
        return experts_cuts.main()
    start = time.perf_counter()
    torch.cuda.init()
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        todo = jobs()
        list(pool.map(compile_in_child, todo))
    print(f"compiled {len(todo)} in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(time.time_ns())
    checks = Checks()
    check_experts(checks)
    check_and_time_rows(checks)
    print(f"checked after {time.perf_counter() - start:.0f} s: {checks.failed} wrong", flush=True)
    for shape, counts in ((GLM, TOKENS), (SLICE, SLICE_TOKENS)):
        tensors = weights(shape, torch.bfloat16)
        for tokens in counts:
            if time.perf_counter() - start > BUDGET_S:
                print(f"{shape.name} T {tokens}: out of time")
                continue
            case = Case(shape, tokens, *tensors, sets=8 if tokens <= 64 else 3 if tokens <= 2048 else 1)
            sweep(checks, case, start + BUDGET_S)
        del tensors
    print(f"{checks.failed} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
