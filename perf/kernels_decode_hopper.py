"""Checks and times the decode attention kernels for Hopper, on a Hopper GPU: `python -m perf.kernels_decode_hopper`.

A wrong result, a crash or a hang makes the exit code 1. Kernels are compiled and checked in separate processes, so that
one that fails is named and does not affect the others. Times are of one layer's attention and values on one of two
ranks, measured as in perf/kernels_decode.py, beside the portable kernel's; rates count the bytes of the contexts' rows.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch

from perf.decode_cases import (
    LATENT,
    UNCUT,
    VALUE,
    WIDTH,
    Checks,
    attention,
    attention_wanted,
    normal,
    parts_on_gpu,
)
from perf.kernels_decode import HEADS, Layers, overlapping, speed
from splash_plugins.grouped_experts.device import limits
from splash_plugins.mla_attention.decode_kernel import DecodeConfig, choose_config, hopper_config
from splash_plugins.value_up import reference
from splash_plugins.value_up.kernel import decode_values

SHAPES = tuple((queries, 600) for queries in (1, 4, 16, 32, 64, 128, 256, 512)) + ((1, 15000), (16, 4000))
# (queries, rows of their contexts, rows of one more query's)
UNEVEN = ((128, 876, 4706), (20, 3000, 22908))
# (heads, dtype, stride of tables, rows of a page, whether kernels overlap)
CASES = (
    (10, torch.bfloat16, 1, 64, True),
    (16, torch.float16, 1, 128, False),
    (20, torch.float16, 2, 64, True),
    (32, torch.bfloat16, 2, 64, True),
    (64, torch.bfloat16, 1, 64, True),
    (128, torch.float16, 1, 64, False),
)
LENGTHS = [0, 1, 63, 64, 65, 600, 15000, 130, 129, 128, 0]
CHILDREN = 15
DEADLINE_S, BUDGET_S = 50, 75  # of the checks; and no shape is begun after so many seconds
Job = tuple[Callable[..., None], tuple[Any, ...]]


def check_lengths(stages: int, heads: int, dtype: torch.dtype, stride: int, page_tokens: int, overlap: bool) -> None:
    """Compares with the reference, with contexts cut in several ways."""
    config = hopper_config(stages, heads)
    case = attention(LENGTHS, heads, dtype, 2, 2, stride, page_tokens)
    want = attention_wanted(case)
    checks = Checks()
    with overlapping(overlap):
        for size in (UNCUT, 34, 3, 2, None):
            checks.attention(f"{heads, stride, page_tokens}", case, want, size, config=config)
    assert not checks.failed


def check_many(stages: int) -> None:
    """More programs than can run at once, several times: results must be right, and the same bits each time."""
    case = attention([*torch.randint(0, 1500, (300,)).tolist(), 6000], 10, torch.bfloat16, 2, 1)
    want, config, checks = attention_wanted(case), hopper_config(stages, 10), Checks()
    for size in (UNCUT, None):
        outs = []
        for _ in range(5):
            checks.attention("many", case, want, size, config=config)
            outs.append(case.out.clone())
        assert all(torch.equal(out, outs[0]) for out in outs[1:]), "results move"
    assert not checks.failed


def check_values(stages: int) -> None:
    case = attention(LENGTHS, 10, torch.bfloat16, 1)
    w_uv = normal(10, VALUE, LATENT, scale=LATENT**-0.5)
    out, want = (normal(len(LENGTHS), 10, VALUE) for _ in range(2))
    reference.decode_values(case.q, *case.index(), [w_uv], want)
    checks = Checks()
    for fuse, size in itertools.product((False, True), (UNCUT, 30, 3)):
        out.fill_(torch.nan)
        index = case.index(parts=parts_on_gpu(LENGTHS, 10, size))
        decode_values(case.q, *index, [w_uv], out, config=hopper_config(stages, 10), fuse=fuse)
        checks.see(f"decode_values {fuse} {size}", torch.bfloat16, ((out, want),))
    assert not checks.failed


def warm(*lengths: int) -> None:
    """Compiles the kernels that will be timed."""
    layers = Layers(lengths, 1)
    layers.attend(0)
    layers.attend(0, config=portable_config(len(lengths)))


def tried(job: Job) -> str:
    """Runs a job. Returns what went wrong, or an empty string."""
    torch.manual_seed(time.time_ns())
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            job[0](*job[1])
            torch.cuda.synchronize()
    except (RuntimeError, AssertionError, ValueError) as error:
        return said.getvalue() + f"{type(error).__name__}: {error}"[:600]
    return said.getvalue()


def check_all() -> int:
    """Runs all checks, each in a process of its own; returns how many went wrong."""
    jobs: list[Job] = []
    for stages in (1, 2):
        jobs += [(check_many, (stages,)), (check_values, (stages,))]
        jobs += [(check_lengths, (stages, *what)) for what in CASES]
    jobs += [(warm, lengths) for lengths in contexts().values()]
    wrong = 0
    end = time.perf_counter() + DEADLINE_S
    pool = multiprocessing.get_context("spawn").Pool(CHILDREN, maxtasksperchild=1)
    results = [pool.apply_async(tried, (job,)) for job in jobs]
    for job, result in zip(jobs, results, strict=True):
        try:
            said = result.get(max(0.1, end - time.perf_counter()))
        except multiprocessing.TimeoutError:
            said = "not done in time"
        wrong += bool(said)
        if said:
            print(f"WRONG {job[0].__name__}{job[1][:8]}: {said}")
    pool.terminate()
    return wrong


def portable_config(queries: int) -> DecodeConfig:
    return choose_config(HEADS, 2, limits(torch.device("cuda")).shared_bytes, True, queries)


def contexts() -> dict[str, tuple[int, ...]]:
    """The lengths of the contexts that are timed, by name."""
    found = {f"A {queries} context {context}": (context,) * queries for queries, context in SHAPES}
    return found | {f"A {n} context {rows}, one {most}": (*(rows,) * n, most) for n, rows, most in UNEVEN}


def time_contexts(name: str, lengths: tuple[int, ...]) -> None:
    layers = Layers(lengths, None)
    num_bytes = sum(lengths) * WIDTH * 2
    config = portable_config(len(lengths))
    own = layers.per_layer(layers.attend)
    portable = layers.per_layer(lambda n: layers.attend(n, config=config))
    print(f"{name}: {speed(own, num_bytes)}, portable {speed(portable, num_bytes)}", flush=True)


def main() -> int:
    start = time.perf_counter()
    wrong = check_all()
    print(f"checked after {time.perf_counter() - start:.0f} s: {wrong} wrong", flush=True)
    if wrong:
        return 1
    for name, lengths in contexts().items():
        if time.perf_counter() - start < BUDGET_S:
            time_contexts(name, lengths)
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
