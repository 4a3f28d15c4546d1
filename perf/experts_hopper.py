"""Checks and times the routed experts' kernel for Hopper beside the portable one: `python -m perf.kernels_experts
--hopper`. The letters are those of kernels_experts.py.

Each check: fresh random numbers, into an output full of NaN, against plain torch; the same bits when it is repeated. A
wrong result makes the exit code 1, a kernel that hangs ends the process by SIGALRM.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from perf.expert_cases import GLM, GPU, SLICE, Case, Checks, Shape, time_us, weights
from splash_plugins.grouped_experts import kernel
from splash_plugins.grouped_experts.device import limits
from splash_plugins.grouped_experts.gather_kernel import gather_rows
from splash_plugins.grouped_experts.hopper_kernel import DOWN, GATE_UP, ROWS, Form, product
from splash_plugins.grouped_experts.sort_kernel import SortedPairs, sort_pairs
from splash_plugins.grouped_experts.tiles import choose

TOKENS = (1024, 2048, 4096, 8192, 16384)
SLICE_TOKENS = (1024, 4096)
REPEATS = 4  # of a check, for the same bits
TIMEOUT_S = 90
COMPILERS = 14
BUSY = 5  # the expert that gets nearly everything
ORDERED = Form(gather=False)
NARROW = Form(columns=128, stages=6)
GATE_FORMS = (
    GATE_UP,
    *(Form(gather=True, group=group) for group in (4, 16)),
    Form(gather=True, stages=3),
    Form(gather=True, columns=128, stages=6),
    ORDERED,
    Form(group=16),
    NARROW,
)
DOWN_FORMS = (DOWN, *(Form(group=group) for group in (4, 16)), Form(stages=3), NARROW)
SLICE_GATE, SLICE_DOWN = (GATE_UP, ORDERED, GATE_FORMS[2]), (DOWN, DOWN_FORMS[2])


def form_name(form: Form) -> str:
    rows = "gathered" if form.gather else "in order"
    return f"{ROWS}x{form.columns}x64 s{form.stages} g{form.group} {rows}"


@dataclass(frozen=True)
class Variant:
    """The whole operation with these forms; rows are put in order first where they are not gathered."""

    gate_up: Form = GATE_UP
    down: Form = DOWN

    def run(
        self,
        x: torch.Tensor,
        choice: torch.Tensor,
        weight: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        first_expert: int,
        addend: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        num_experts, width, inner = down.shape
        num_pairs, top_k = choice.numel(), choice.shape[1]
        order = sort_pairs(choice, num_experts, first_expert, ROWS)
        rows = x if self.gate_up.gather else gather_rows(x, order.pairs, order.ends[-1:], top_k)[0]
        hidden = x.new_empty((num_pairs, inner))
        product(rows, gate_up, hidden, order, top_k, True, self.gate_up)
        y = x.new_empty((num_pairs, width))
        product(hidden, down, y, order, top_k, False, self.down)
        kernel.combine(y, choice, weight, first_expert, num_experts, addend, out)


def portable(case: Case) -> None:
    """The whole operation by the other kernels."""
    num_experts, width, inner = case.down.shape
    plan = choose(case.tokens, case.shape.top_k, num_experts, width, inner, case.down.element_size(), limits(GPU))
    where = (case.gate_up, case.down, case.first, case.addend, case.out)
    kernel.grouped_experts(case.x[0], case.choice[0], case.weight[0], *where, plan=plan)


def spread(case: Case, how: str) -> None:
    """Routes the case's tokens otherwise."""
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


def check(checks: Checks, what: str, case: Case, run: Callable[..., None], want: torch.Tensor) -> None:
    checks.experts(what, case, run, want)
    first = case.out.clone()
    for _ in range(REPEATS):
        case.out.fill_(torch.nan)
        run(*case.arguments(0))
        if not torch.equal(case.out, first):
            checks.failed += 1
            print(f"WRONG {case.shape.name} T {case.tokens} {what}: other bits when repeated", flush=True)
            return


def check_all(checks: Checks, shape: Shape, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """The chosen forms on every spread, and each other form on the uniform one, at the fewest tokens and at most."""
    tensors = weights(shape, dtype)
    gate_forms, down_forms = forms(shape)
    for tokens in counts:
        for how in SPREADS:
            case = Case(shape, tokens, *tensors, sets=1)
            spread(case, how)
            want = case.wanted()
            check(checks, f"{dtype} {how}", case, Variant().run, want)
            if tokens in (counts[0], counts[-1]) and how in SPREADS[:2] and dtype is torch.bfloat16:
                for form in gate_forms:
                    check(checks, f"{how}, gate-up {form_name(form)}", case, Variant(gate_up=form).run, want)
                for form in down_forms:
                    check(checks, f"{how}, down {form_name(form)}", case, Variant(down=form).run, want)


def forms(shape: Shape) -> tuple[tuple[Form, ...], tuple[Form, ...]]:
    return (GATE_FORMS, DOWN_FORMS) if shape is GLM else (SLICE_GATE, SLICE_DOWN)


def time_products(case: Case, order: SortedPairs) -> tuple[Form, Form]:
    """Prints each form's time; returns the fastest two for the whole operation."""
    shape, x, top_k = case.shape, case.x[0], case.shape.top_k
    num_pairs = len(order.pairs)
    hidden = x.new_empty((num_pairs, shape.inner))
    y = x.new_empty((num_pairs, shape.hidden))
    rows = gather_rows(x, order.pairs, order.ends[-1:], top_k)[0]
    sorting = time_us([lambda: sort_pairs(case.choice[0], shape.local, case.first, ROWS)] * 4)
    ordering = time_us([lambda: gather_rows(x, order.pairs, order.ends[-1:], top_k)] * 4)
    weight = case.weight[0]

    def combine() -> None:
        kernel.combine(y, case.choice[0], weight, case.first, shape.local, case.addend, case.out)

    adding = time_us([combine] * 4)
    print(f"  sort {sorting:.1f} us, rows put in order {ordering:.1f} us, combine {adding:.1f} us")
    operations = case.pairs() * shape.hidden * shape.inner * 2

    def show(what: str, us: float, times: int) -> None:
        print(f"  {what:45} {us:8.1f} us {operations * times / us / 1e6:6.0f} TFLOP/s", flush=True)

    gate_forms, down_forms = forms(shape)
    times: dict[Form, float] = {}
    for form in gate_forms:
        source = x if form.gather else rows
        us = time_us([functools.partial(product, source, case.gate_up, hidden, order, top_k, True, form)] * 2)
        times[form] = us + (0 if form.gather else ordering)
        show(f"gate-up {form_name(form)}", us, 2)
    gate_up = min(times, key=lambda form: times[form])
    times = {}
    for form in down_forms:
        us = time_us([functools.partial(product, hidden, case.down, y, order, top_k, False, form)] * 2)
        times[form] = us
        show(f"down    {form_name(form)}", us, 1)
    return gate_up, min(times, key=lambda form: times[form])


def time_all(shape: Shape, counts: tuple[int, ...]) -> None:
    tensors = weights(shape, torch.bfloat16)
    for tokens in counts:
        case = Case(shape, tokens, *tensors, sets=1)
        order = sort_pairs(case.choice[0], shape.local, case.first, ROWS)
        pairs, blocks = case.pairs(), int(order.num_blocks)
        print(f"{shape.name} T {tokens}: {pairs:.0f} pairs here, blocks {pairs / ROWS / blocks:.0%} full")
        best = Variant(*time_products(case, order))
        cost = pairs * shape.hidden * shape.inner * 6
        for what, launch in (
            ("portable", functools.partial(portable, case)),
            ("for Hopper, default forms", functools.partial(Variant().run, *case.arguments(0))),
            (
                f"for Hopper, {form_name(best.gate_up)} | {form_name(best.down)}",
                functools.partial(best.run, *case.arguments(0)),
            ),
        ):
            us = time_us([launch] * 2)
            print(f"  whole: {us:8.1f} us {cost / us / 1e6:6.0f} TFLOP/s  {what}", flush=True)
    rows, w = torch.randn(16384, shape.hidden, device=GPU, dtype=torch.bfloat16), tensors[0][0]
    us = time_us([lambda: torch.mm(rows, w.T)] * 4)
    print(f"  one dense product of 16,384 such rows: {2 * len(rows) * w.numel() / us / 1e6:.0f} TFLOP/s", flush=True)


Job = tuple[Shape, torch.dtype, Variant | None, int]


def jobs() -> list[Job]:
    found: dict[Job, None] = {}
    for shape in (GLM, SLICE):
        gate_forms, down_forms = forms(shape)
        for form in gate_forms:
            found[shape, torch.bfloat16, Variant(gate_up=form), 512] = None
        for form in down_forms:
            found[shape, torch.bfloat16, Variant(down=form), 512] = None
        for tokens in (1024, 4096):
            found[shape, torch.bfloat16, None, tokens] = None
    found[GLM, torch.float16, Variant(), 512] = None
    # Those alone that compile something.
    return [job for job in found if job[2] is None or job[2].gate_up.group == job[2].down.group == 8]


def compile_in_child(job: Job) -> None:
    """Leaves the kernels in Triton's cache on disk: a launch that hits no expert, over memory that nobody reads."""
    shape, dtype, variant, tokens = job
    gate_up = torch.empty(shape.local, 2 * shape.inner, shape.hidden, device=GPU, dtype=dtype)
    down = torch.empty(shape.local, shape.hidden, shape.inner, device=GPU, dtype=dtype)
    case = Case(shape, tokens, gate_up, down, sets=1, first=1 << 20)
    if variant:
        variant.run(*case.arguments(0))
    else:
        portable(case)
    torch.cuda.synchronize()


def main() -> int:
    signal.alarm(TIMEOUT_S)
    start = time.perf_counter()
    todo = jobs()
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_in_child, todo))
    print(f"compiled {len(todo)} in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(time.time_ns())
    checks = Checks()
    check_all(checks, GLM, TOKENS, torch.bfloat16)
    check_all(checks, GLM, TOKENS[:1], torch.float16)
    check_all(checks, SLICE, SLICE_TOKENS, torch.bfloat16)
    print(f"checked after {time.perf_counter() - start:.0f} s: {checks.failed} wrong", flush=True)
    if not checks.failed:
        time_all(GLM, TOKENS)
        time_all(SLICE, SLICE_TOKENS)
    print(f"{checks.failed} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if checks.failed else 0
