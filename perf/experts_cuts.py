"""Times the routed experts of two ranks for both ways of cutting them, whole experts or inside each: `python -m
perf.kernels_experts --cuts`. Letters as in kernels_experts.py.

With whole experts, a step waits for the rank whose experts are chosen more (more distinct ones). Sets of tokens are
arranged so that this is always the first rank, whose time is the one to compare; the other rank's is printed too. With
experts cut inside, all ranks do the same work. Times are of the whole operation, with the sum over a token's experts,
which is also timed alone. Both ways are first compared with plain torch, into outputs full of NaN; a wrong result makes
the exit code 1.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from perf.expert_cases import GLM, GLM_INSIDE, GPU, Case, Checks, Shape, time_us, weights
from splash_plugins.grouped_experts.kernel import combine, grouped_experts

TOKENS = (1, 16, 64, 128, 512, 1024, 2048, 8192, 16384)
COMPILERS = 8
INSIDE = functools.partial(grouped_experts, all_here=True)


def turn(case: Case) -> None:
    """Swaps the two ranks' experts in sets of tokens where the second rank would use more distinct ones, or as many for
    more pairs."""
    local = case.shape.local
    for choice in case.choice:
        first, second = (choice[here] for here in (choice < local, choice >= local))
        if (len(second.unique()), len(second)) > (len(first.unique()), len(first)):
            choice.add_(local).remainder_(2 * local)


def us_of(case: Case, run: Callable[..., None]) -> float:
    return time_us([functools.partial(run, *case.arguments(i)) for i in range(case.sets)])


def combine_us(case: Case) -> float:
    y = torch.randn(case.choice[0].numel(), case.shape.hidden, device=GPU, dtype=case.out.dtype)
    where = (case.first, case.shape.local, case.addend, case.out)
    return time_us([functools.partial(combine, y, case.choice[i], case.weight[i], *where) for i in range(case.sets)])


def compare(checks: Checks, tokens: int, whole: Case, inside: Case) -> None:
    """Checks and times both ways on the same tokens and choices."""
    turn(whole)
    inside.x, inside.choice, inside.weight = whole.x, whole.choice, whole.weight
    checks.experts("whole", whole, grouped_experts, whole.wanted())
    checks.experts("inside", inside, INSIDE, inside.wanted())
    hit, here = whole.hit(), inside.hit()
    slower, us = us_of(whole, grouped_experts), us_of(inside, INSIDE)
    whole.first = whole.shape.local
    other = us_of(whole, grouped_experts)
    whole.first = 0
    print(
        f"T {tokens:5}: whole {slower:7.1f} us with {hit:4.1f} hit ({other:7.1f} the other rank), inside {us:7.1f} us"
        f" with {here:4.1f} hit in part, {us - slower:+7.1f} us ({us / slower - 1:+.0%}); of these combine"
        f" {combine_us(whole):6.1f} and {combine_us(inside):6.1f}",
        flush=True,
    )


def compile_in_child(job: tuple[Shape, int]) -> None:
    """Puts the kernels into Triton's cache on disk, by a launch in which no expert is chosen and no weight is read."""
    shape, tokens = job
    gate_up = torch.empty(shape.local, 2 * shape.inner, shape.hidden, device=GPU, dtype=torch.bfloat16)
    down = torch.empty(shape.local, shape.hidden, shape.inner, device=GPU, dtype=torch.bfloat16)
    case = Case(shape, tokens, gate_up, down, sets=1, first=1 << 20)
    (INSIDE if shape is GLM_INSIDE else grouped_experts)(*case.arguments(0))
    torch.cuda.synchronize()


def main() -> int:
    start = time.perf_counter()
    jobs = [(shape, tokens) for tokens in TOKENS for shape in (GLM, GLM_INSIDE)]
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_in_child, jobs))
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(time.time_ns())
    checks = Checks()
    tensors = {shape: weights(shape, torch.bfloat16) for shape in (GLM, GLM_INSIDE)}
    for tokens in TOKENS:
        sets = 16 if tokens <= 64 else 3 if tokens <= 2048 else 1
        whole, inside = (Case(shape, tokens, *tensors[shape], sets=sets) for shape in (GLM, GLM_INSIDE))
        compare(checks, tokens, whole, inside)
    print(f"{checks.failed} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if checks.failed else 0
