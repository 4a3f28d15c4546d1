"""Checks and times the routed experts' kernel for Hopper beside the portable one: `python -m perf.kernels_experts
--hopper`. Letters as in kernels_experts.py.

A check computes from fresh random numbers into an output full of NaN, compares with plain torch, and repeats it for
the same bits. A wrong result makes the exit code 1; if a kernel hangs, SIGALRM ends the process.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from perf.expert_cases import GLM, GPU, SLICE, Case, Checks, Shape, time_us, weights
from splash_plugins.grouped_experts import kernel
from splash_plugins.grouped_experts.device import limits
from splash_plugins.grouped_experts.hopper_kernel import ROWS, is_chosen, product
from splash_plugins.grouped_experts.sort_kernel import sort_pairs
from splash_plugins.grouped_experts.tiles import choose

TOKENS = {GLM: (1024, 2048, 4096, 8192, 16384), SLICE: (1024, 4096)}
REPEATS = 4  # of a check, which must give the same bits
TIMEOUT_S = 90
COMPILERS = 8
BUSY = 5  # the expert that gets nearly everything


def portable(case: Case) -> None:
    """The whole operation by the portable kernels."""
    num_experts, width, inner = case.down.shape
    plan = choose(case.tokens, case.shape.top_k, num_experts, width, inner, case.down.element_size(), limits(GPU))
    where = (case.gate_up, case.down, case.first, case.addend, case.out)
    kernel.grouped_experts(case.x[0], case.choice[0], case.weight[0], *where, plan=plan)


def spread(case: Case, how: str) -> None:
    """Changes how the case's tokens are routed."""
    choice, x = case.choice[0], case.x[0]
    if how == "one expert gets 90 %":
        choice[torch.rand(choice.shape, device=GPU) < 0.9] = BUSY
    elif how == "empty experts":
        choice[choice % 5 != 3] = case.shape.local  # the other rank's
    elif how == "padding rows":
        rest = case.tokens - case.tokens // 3 - 1
        choice[rest:], x[rest:] = -1, torch.nan
    elif how == "nobody here":
        choice.fill_(-1)


SPREADS = ("uniform", "one expert gets 90 %", "empty experts", "padding rows", "nobody here")


def check(checks: Checks, what: str, case: Case) -> None:
    assert is_chosen(case.x[0], case.gate_up, case.down, case.choice[0].numel())
    checks.experts(what, case, kernel.grouped_experts, case.wanted())
    first = case.out.clone()
    for _ in range(REPEATS):
        case.out.fill_(torch.nan)
        kernel.grouped_experts(*case.arguments(0))
        if not torch.equal(case.out, first):
            checks.failed += 1
            print(f"WRONG {case.shape.name} T {case.tokens} {what}: other bits when repeated", flush=True)
            return


def check_all(checks: Checks, shape: Shape, counts: Sequence[int], dtype: torch.dtype) -> None:
    tensors = weights(shape, dtype)
    for tokens in counts:
        for how in SPREADS:
            case = Case(shape, tokens, *tensors, sets=1)
            spread(case, how)
            check(checks, f"{dtype} {how}", case)


def time_tokens(case: Case) -> None:
    """Prints the time of the whole operation, that of the portable kernels, and that of each launch."""
    shape, x, top_k, choice = case.shape, case.x[0], case.shape.top_k, case.choice[0]
    order = sort_pairs(choice, shape.local, case.first, ROWS)
    pairs, blocks = case.pairs(), int(order.num_blocks)
    hidden = x.new_empty((choice.numel(), shape.inner))
    y = x.new_empty((choice.numel(), shape.hidden))
    where = (case.weight[0], case.first, shape.local, case.addend, case.out)
    launches: dict[str, tuple[int, Callable[[], object]]] = {
        "portable": (6, functools.partial(portable, case)),
        "for Hopper": (6, functools.partial(kernel.grouped_experts, *case.arguments(0))),
        "sort": (0, functools.partial(sort_pairs, choice, shape.local, case.first, ROWS)),
        "gate-up": (4, functools.partial(product, x, case.gate_up, hidden, order, top_k, True)),
        "down": (2, functools.partial(product, hidden, case.down, y, order, top_k, False)),
        "combine": (0, functools.partial(kernel.combine, y, choice, *where)),
    }
    said = []
    for what, (operations, launch) in launches.items():
        us = time_us([launch] * 2)
        rate = pairs * shape.hidden * shape.inner * operations / us / 1e6
        said.append(f"{what} {us:.1f} us" + (f" ({rate:.0f} TFLOP/s)" if operations else ""))
    full = f"blocks {pairs / ROWS / blocks:.0%} full"
    print(f"{shape.name} T {case.tokens}, {full}: {', '.join(said)}", flush=True)


def compile_in_child(job: tuple[Shape, torch.dtype, int]) -> None:
    """Puts the kernels into Triton's cache on disk, by launches in which no expert is chosen and no weight is read."""
    shape, dtype, tokens = job
    gate_up = torch.empty(shape.local, 2 * shape.inner, shape.hidden, device=GPU, dtype=dtype)
    down = torch.empty(shape.local, shape.hidden, shape.inner, device=GPU, dtype=dtype)
    case = Case(shape, tokens, gate_up, down, sets=1, first=1 << 20)
    kernel.grouped_experts(*case.arguments(0))
    if dtype is torch.bfloat16:
        portable(case)
    torch.cuda.synchronize()


def main() -> int:
    signal.alarm(TIMEOUT_S)
    start = time.perf_counter()
    jobs = [(shape, torch.bfloat16, tokens) for shape in TOKENS for tokens in (1024, 4096)]
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_in_child, [*jobs, (GLM, torch.float16, 1024)]))
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(time.time_ns())
    checks = Checks()
    for shape, counts in TOKENS.items():
        check_all(checks, shape, counts, torch.bfloat16)
    check_all(checks, GLM, TOKENS[GLM][:1], torch.float16)
    print(f"checked after {time.perf_counter() - start:.0f} s: {checks.failed} wrong", flush=True)
    if checks.failed:
        return 1
    for shape, counts in TOKENS.items():
        tensors = weights(shape, torch.bfloat16)
        for tokens in counts:
            time_tokens(Case(shape, tokens, *tensors, sets=1))
    print(f"{time.perf_counter() - start:.0f} s")
    return 0
