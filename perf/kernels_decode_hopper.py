"""Checks and times Hopper's own decode attention on one of them: `python -m perf.kernels_decode_hopper`.

A wrong result, a crash or a hang makes the exit code 1. Variants are compiled and checked in processes of their own, so
that one that fails is named and leaves the others alone. Times are of attention and values of one layer of a rank of
two, as perf/kernels_decode.py takes them, with the bytes of the contexts' rows.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import torch

from perf.decode_cases import LATENT, SCALE, VALUE, WIDTH, Checks, attention, attention_wanted, normal
from perf.kernels_decode import Layers, overlapping, speed, time_few
from splash_plugins.mla_attention.decode_hopper_kernel import Pipeline
from splash_plugins.mla_attention.decode_kernel import DecodeConfig, attention_parts, hopper_config
from splash_plugins.value_up import reference
from splash_plugins.value_up.kernel import BLOCK_V, PARTS, decode_values, merge_up

SHAPES = tuple((queries, 600) for queries in (1, 4, 16, 32, 64, 128, 256, 512)) + ((1, 15000), (16, 4000))
LENGTHS = [0, 1, 63, 64, 65, 600, 15000, 130, 129, 128, 0]
VARIANTS = {
    "3": Pipeline(3),
    "3 ahead": Pipeline(3, ahead=True),
    "3 early": Pipeline(3, early=True),
    "3 ahead early": Pipeline(3, ahead=True, early=True),
    "3 no fetch": Pipeline(3, fetch=False),
    "3 rest": Pipeline(3, rest=True),
    "2": Pipeline(2),
    "1": Pipeline(1),
}
WIDE = {"2": Pipeline(2), "2 ahead": Pipeline(2, ahead=True), "1": Pipeline(1)}
FEW = 16  # up to so many queries, values may take parts of contexts
SMS = 132
CHILDREN = 15
DEADLINE_S, BUDGET_S = 50, 75
Job = tuple[Callable[..., None], tuple[Any, ...]]


def check_lengths(
    dtype: torch.dtype, heads: int, pipeline: Pipeline, wanted: bool, stride: int = 1, page_tokens: int = 64
) -> None:
    """Against the reference, by several cuts of the contexts."""
    config = hopper_config(pipeline)
    case = attention(LENGTHS, heads, dtype, 2, 2, stride, page_tokens)
    want = attention_wanted(case)
    checks = Checks()
    with overlapping(wanted):
        for splits in (1, 2, 7, 132):
            checks.attention(f"{heads, stride, page_tokens}", case, want, config=config, num_splits=splits)
    assert not checks.failed


def check_many(pipeline: Pipeline) -> None:
    """More programs than run at once, over and over: bit for bit the same, and right."""
    case = attention(torch.randint(0, 1500, (300,)).tolist(), 10, torch.bfloat16, 2, 1)
    want, config, checks = attention_wanted(case), hopper_config(pipeline), Checks()
    for splits in (1, 3):
        outs = []
        for _ in range(5):
            checks.attention("many", case, want, config=config, num_splits=splits)
            outs.append(case.out.clone())
        assert all(torch.equal(out, outs[0]) for out in outs[1:]), "results move"
    assert not checks.failed


def check_values(pipeline: Pipeline) -> None:
    case = attention(LENGTHS, 10, torch.bfloat16, 1)
    w_uv = normal(10, VALUE, LATENT, scale=LATENT**-0.5)
    index = (case.layers[0], case.tables, case.slot, case.first, case.length, 1, LATENT, SCALE)
    out, want = (normal(len(LENGTHS), 10, VALUE) for _ in range(2))
    reference.decode_values(case.q, *index, [w_uv], want)
    checks = Checks()
    for fuse, splits in ((False, 1), (False, 8), (True, 8)):
        out.fill_(torch.nan)
        options: dict[str, Any] = {"config": hopper_config(pipeline), "num_splits": splits, "fuse": fuse}
        decode_values(case.q, *index, [w_uv], out, **options)
        checks.see(f"decode_values {fuse} {splits}", torch.bfloat16, ((out, want),))
    assert not checks.failed


def check_variant(pipeline: Pipeline) -> None:
    check_lengths(torch.bfloat16, 10, pipeline, True)
    check_many(pipeline)
    check_values(pipeline)


def check_wide(heads: int, pipeline: Pipeline) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check_lengths(dtype, heads, pipeline, True, stride=2)


def check_else(pipeline: Pipeline) -> None:
    check_lengths(torch.float16, 10, pipeline, True, stride=2)
    check_lengths(torch.bfloat16, 16, pipeline, False, page_tokens=128)


def warm_shape(queries: int, context: int) -> None:
    """Compiles what merges parts, and the kernel to compare with."""
    layers = Layers(queries, context, 1)
    layers.attend(0)
    for splits, fuse in cuts(queries, context, 1) | cuts(queries, context, 2):
        layers.attend(0, config=hopper_config(VARIANTS["3"]), num_splits=splits, fuse=fuse)
    time_merging(layers, 1)


def tried(job: Job) -> str:
    """What went wrong, or nothing."""
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
    """Number of jobs that went wrong."""
    jobs: list[Job] = [(check_variant, (pipeline,)) for pipeline in VARIANTS.values()]
    jobs += [(warm_shape, shape) for shape in SHAPES if shape[0] <= FEW]
    jobs += [(check_wide, (heads, pipeline)) for heads, pipeline in zip((20, 32, 20), WIDE.values(), strict=True)]
    jobs += [(check_else, (VARIANTS[name],)) for name in ("3", "3 ahead")] + [(warm_shape, (40, 600))]
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
            print(f"WRONG {job[0].__name__}{job[1]}: {said}")
    pool.terminate()
    return wrong


def cuts(queries: int, context: int, programs_per_sm: int) -> set[tuple[int, bool]]:
    """(parts of a context, whether values take parts) that may be worth it."""
    tiles = -(-context // 64)
    full = programs_per_sm * SMS / queries
    parts = {max(1, min(tiles, SMS, int(full * factor))) for factor in (0.5, 1, 2)}
    if queries <= FEW:
        parts.add(min(SMS, -(-tiles // 2)))
    return {(n, fuse) for n in parts for fuse in (False, True) if not fuse or 1 < n and queries <= FEW}


def configs() -> Iterator[tuple[str, DecodeConfig]]:
    for name, pipeline in VARIANTS.items():
        yield name, hopper_config(pipeline)


def time_shape(queries: int, context: int) -> None:
    layers = Layers(queries, context, None)
    num_bytes = queries * context * WIDTH * 2
    before = layers.per_layer(layers.attend)
    print(f"A {queries} context {context}: Triton {speed(before, num_bytes)}")
    found = []
    for name, config in configs():
        for splits, fuse in sorted(cuts(queries, context, config.programs_per_sm)):
            options = {"config": config, "num_splits": splits, "fuse": fuse}
            us = layers.per_layer(lambda n, o=options: layers.attend(n, **o))  # type: ignore[misc]
            found.append((us, f"{name} / {splits}{' fused' if fuse else ''}"))
    found.sort()
    for us, name in found[:3]:
        print(f"    {speed(us, num_bytes)}  {name}")
    print("    " + "; ".join(f"{name} {us:.1f}" for us, name in found[3:]))
    if queries <= FEW:
        time_merging(layers, layers.num)
    config = hopper_config(VARIANTS["3"])
    splits = max(2, min(-(-context // 64), SMS // queries))
    alone = time_few(lambda n: parts_of(layers, n, config, splits), layers.num)
    values = layers.per_layer(layers.value_up)
    print(f"    attention alone, {splits} parts {alone:.1f}; values alone {values:.1f}", flush=True)


def parts_of(layers: Layers, n: int, config: DecodeConfig, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    case = layers.case
    index = (case.tables, case.slot, case.first, case.length, 1, LATENT, SCALE)
    return attention_parts(case.q, case.layers[n], *index, config, splits)


def time_merging(layers: Layers, num: int) -> None:
    """By how many columns of values and parts a program takes that merges as well."""
    case, config = layers.case, hopper_config(VARIANTS["3"])
    context = int(case.length[0])
    splits = max(2, min(-(-context // 64), SMS // len(case.q)))
    times = []
    for block_v, at_once in itertools.product((BLOCK_V, BLOCK_V * 2, BLOCK_V * 4), (PARTS, PARTS * 2)):
        cut = {"block_v": block_v, "parts": at_once}

        def launch(n: int, cut: dict[str, int] = cut) -> None:
            part, lse = parts_of(layers, n, config, splits)
            merge_up(part, lse, case.length, config.block_n, layers.w_uv[n], 0, layers.values, **cut)

        times.append(f"{block_v} {at_once}: {time_few(launch, num):.1f}")
    if num > 1:
        print(f"    fused, {splits} parts, by columns and parts at once: {', '.join(times)}")


def main() -> int:
    start = time.perf_counter()
    wrong = check_all()
    print(f"checked after {time.perf_counter() - start:.0f} s: {wrong} wrong", flush=True)
    if wrong:
        return 1
    for queries, context in SHAPES:
        if time.perf_counter() - start < BUDGET_S:
            time_shape(queries, context)
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
