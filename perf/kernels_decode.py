"""Checks and times the kernels around decode attention on a GPU: `python -m perf.kernels_decode`.

A wrong result makes the exit code 1. Times are medians over replays of CUDA graphs of several launches, each on another
layer, so that no launch finds its rows or weights in the L2 cache. Kernels are compiled, and tiles tried, in separate
processes: what crashes is named and left out.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import astuple
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from perf.decode_cases import (
    DTYPES,
    LATENT,
    NOPE,
    ROPE,
    UNCUT,
    VALUE,
    WIDTH,
    Attention,
    Checks,
    attention,
    attention_wanted,
    check_attention,
    check_heads,
    check_products,
    check_rows,
    latent_inputs,
    norm_inputs,
    normal,
    parts_on_gpu,
    rope_inputs,
    time_us,
)
from splash_plugins import overlap_kernel
from splash_plugins.absorb.kernel import absorb
from splash_plugins.few_rows.kernel import gated, linear
from splash_plugins.latent_rows.kernel import latent_rows
from splash_plugins.mla_attention.cut import TILE_ROWS, Parts, extra_parts
from splash_plugins.mla_attention.decode_kernel import DecodeConfig, decode
from splash_plugins.norm.kernel import add_norm
from splash_plugins.rope_q.kernel import rope_q
from splash_plugins.silu_mul.kernel import silu_mul
from splash_plugins.value_up.kernel import decode_values, value_up

BANDWIDTH = 4.3e12  # bytes/s that a copy reaches on an H200, reads and writes together
HEADS, HIDDEN, QUERY = 10, 2048, 768
SHAPES = ((1, 10, 600), (1, 10, 15000), (16, 10, 600), (16, 20, 600), (64, 10, 640), (512, 10, 640))
# (rows of a tile, warps, stages, blocks of latent columns)
TILES = ((32, 4, 3, 1), (32, 4, 3, 4), (32, 4, 4, 4), (32, 8, 3, 1), (64, 4, 2, 1), (64, 4, 2, 4), (64, 8, 2, 1))
LAYERS = ((1, 600), (4, 600), (16, 600), (64, 600), (1, 15000), (16, 4000))
FEW_ROWS = (1, 16, 32)
CHILDREN = 15
Job = tuple[Any, ...]  # a function and its arguments
BUDGET_S = 78  # no new sweep begins after this many seconds


def configs(heads: int) -> list[DecodeConfig]:
    """The configurations to try. Sums [L, block_h] of 64 heads need the registers of 8 warps."""
    most = min(64, max(16, triton.next_power_of_2(heads)))
    return [DecodeConfig(most, n, max(warps, most // 8), stages, parts) for n, warps, stages, parts in TILES]


@contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    before, overlap_kernel.BY_DEFAULT = overlap_kernel.BY_DEFAULT, wanted
    yield
    overlap_kernel.BY_DEFAULT = before


def run_tile(heads: int, config: DecodeConfig) -> None:
    case = attention([300, 64], heads, torch.bfloat16, 2)
    for size in (UNCUT, 2):
        case.run(decode, parts=parts_on_gpu([300, 64], heads, size), config=config)


def run_checks(dtype: torch.dtype, wanted: bool) -> None:
    with overlapping(wanted):
        for check in (check_rows, check_heads, check_products, check_attention):
            check(Checks(), [dtype])


def run_layer(queries: int, context: int, wanted: bool) -> None:
    time_layer(queries, context, (wanted,), 1)


def tried(job: Job) -> str:
    """Runs a job, which puts its kernels into Triton's cache on disk. Returns what went wrong, or an empty string."""
    function, *arguments = job
    try:
        with redirect_stdout(io.StringIO()):
            function(*arguments)
        torch.cuda.synchronize()
    except OutOfResources:
        return "too large"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def try_all() -> dict[Job, str]:
    tiles = [(run_tile, heads, config) for heads in sorted({s[1] for s in SHAPES}) for config in configs(heads)]
    checks = [(run_checks, *what) for what in itertools.product(DTYPES, (False, True))]
    layers = [(run_layer, *layer, wanted) for layer, wanted in itertools.product(LAYERS, (False, True))]
    products = [(time_products, tokens, 1) for tokens in FEW_ROWS]
    jobs: list[Job] = [*layers, *products, *checks, *tiles]
    with multiprocessing.get_context("spawn").Pool(CHILDREN, maxtasksperchild=1) as pool:
        return dict(zip(jobs, pool.map(tried, jobs, chunksize=1), strict=True))


def diagnose(heads: int, config: DecodeConfig) -> None:
    """Prints where a tile accesses memory that it must not, as compute-sanitizer finds it, if that is installed."""
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        return
    job = ",".join(map(str, (heads, *astuple(config)[:5])))
    command = [checker, "--print-limit", "2", sys.executable, "-m", "perf.kernels_decode", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        print("\n".join(done.stdout.splitlines()[:25]))
    except subprocess.TimeoutExpired:
        print("the memory checker took too long")


def sweep(checks: Checks, tiles: list[DecodeConfig], queries: int, heads: int, context: int) -> None:
    rows = queries * context
    num_layers = max(2, min(128, int(300e6 / (rows * WIDTH * 2))))
    case = attention([context] * queries, heads, torch.bfloat16, num_layers)
    want = attention_wanted(case)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for config in tiles:
        programs = queries * triton.cdiv(heads, config.block_h)
        most = triton.cdiv(context, TILE_ROWS)
        fill = {min(most, max(1, round(f * num_sms) // programs)) for f in (0.5, 1, 2)}
        possible = {n for n in fill if queries * (n - 1) <= extra_parts(queries)} | ({1} if programs > 32 else set())
        for size in sorted({triton.cdiv(most, n) for n in possible}):
            checks.attention(f"{queries, heads, context}", case, want, size, config=config)
            options: dict[str, Any] = {"config": config, "parts": parts_on_gpu([context] * queries, heads, size)}
            launches = [lambda n=n, o=options: case.run(decode, n, **o) for n in range(num_layers)]  # type: ignore[misc]
            results.append((time_us(launches, 9), config, size))
    own = time_us([lambda n=n: case.run(decode, n) for n in range(num_layers)])  # type: ignore[misc]
    label = f"{queries, heads, context}"
    print(f"{label:18} chosen  {speed(own, rows * WIDTH * 2)}")
    for us, config, size in sorted(results, key=lambda r: r[0])[:3]:
        tile = f"rows {config.block_n} x {config.parts} warps {config.num_warps} stages {config.num_stages}"
        print(f"{'':18} swept   {speed(us, rows * WIDTH * 2)}  {tile} tiles a part {size}")


def speed(us: float, num_bytes: float) -> str:
    rate = num_bytes / us * 1e6
    return f"{us:8.1f} us {rate / 1e9:7.0f} GB/s {100 * rate / BANDWIDTH:5.1f} %"


def time_rows() -> None:
    """Times kernels over rows, repeated on the same tensors: in a step, too, a launch finds in the L2 cache what the
    launch before it wrote."""
    repeats = 20
    for tokens in (16, 512, 8192):
        hidden, delta, weight = norm_inputs(tokens, torch.bfloat16)
        out = torch.empty_like(hidden)
        us = time_us([lambda: add_norm(hidden, delta, weight, 1e-5, out)] * repeats)  # noqa: B023
        print(f"add_norm    T {tokens:5} {speed(us, tokens * HIDDEN * 2 * 4)}")
        arguments = latent_inputs(tokens, torch.bfloat16).values()
        us = time_us([lambda: latent_rows(*arguments)] * repeats)  # noqa: B023
        print(f"latent_rows T {tokens:5} {speed(us, tokens * 2 * (2 * QUERY + 3 * WIDTH))}")
        q, cos, sin, absorbed = rope_inputs(tokens, torch.bfloat16, HEADS)
        us = time_us([lambda: rope_q(q, cos, sin, True, NOPE, absorbed)] * repeats)  # noqa: B023
        print(f"rope_q      T {tokens:5} {speed(us, HEADS * ROPE * 2 * (2 * tokens + len(absorbed)))}")


class Layers:
    """The inputs of attention in several layers on one of two ranks, for queries with contexts of these lengths."""

    def __init__(self, lengths: Sequence[int], num: int | None) -> None:
        queries = len(lengths)
        self.num = num or max(8, min(48, int(600e6 / (sum(lengths) * WIDTH * 2))))
        self.case: Attention = attention(lengths, HEADS, torch.bfloat16, self.num, spare=4)
        n = self.num
        self.qkv = normal(n, QUERY + WIDTH, HIDDEN, scale=HIDDEN**-0.5)
        self.q_b = normal(n, HEADS * (NOPE + ROPE), QUERY, scale=QUERY**-0.5)
        self.w_uk = normal(n, HEADS, NOPE, LATENT, scale=NOPE**-0.5)
        self.w_uv = normal(n, HEADS, VALUE, LATENT, scale=LATENT**-0.5)
        self.o = normal(n, HEADS * VALUE, HIDDEN, scale=0.02)
        self.rows = latent_inputs(queries, torch.bfloat16)
        self.rows["page"].fill_(-1)
        self.x = normal(queries, HIDDEN)
        self.q = normal(queries, HEADS, NOPE + ROPE)
        self.values = normal(queries, HEADS, VALUE)
        self.out = torch.empty_like(self.x)
        self.second = torch.cuda.Stream()

    def per_layer(self, launch: Callable[[int], None]) -> float:
        return time_few(launch, self.num)

    def begin(self, n: int, columns: int) -> None:
        linear(self.x, self.qkv[n], self.rows["qkv"], columns=columns)
        latent_rows(*self.rows.values())
        linear(self.rows["latent"], self.q_b[n], self.q.flatten(1), columns=columns)

    def absorb(self, n: int) -> None:
        absorb(self.q, self.rows["cos"], self.rows["sin"], True, self.w_uk[n], self.case.q)

    def absorb_apart(self, n: int) -> None:
        torch.bmm(self.q[..., :NOPE].transpose(0, 1), self.w_uk[n], out=self.case.q[..., :LATENT].transpose(0, 1))
        rope_q(self.q, self.rows["cos"], self.rows["sin"], True, NOPE, self.case.q)

    def attend(self, n: int, parts: Parts | None = None, **options: Any) -> None:
        """parts: as in Attention."""
        decode_values(self.case.q, *self.case.index(n, parts), [self.w_uv[n]], self.values, **options)

    def value_up(self, n: int) -> None:
        value_up(self.case.out, self.w_uv[n], self.values)

    def value_up_apart(self, n: int) -> None:
        torch.bmm(self.case.out.transpose(0, 1), self.w_uv[n].transpose(1, 2), out=self.values.transpose(0, 1))

    def end(self, n: int, columns: int) -> None:
        linear(self.values.flatten(1), self.o[n].t(), self.out, columns=columns)

    def before(self, n: int) -> None:
        """Attention's former sequence of launches, by torch's products."""
        self.begin(n, 0)
        self.absorb_apart(n)
        self.case.run(decode, n)
        self.value_up_apart(n)
        self.end(n, 0)

    def whole(self, n: int, columns: int, **options: Any) -> None:
        self.begin(n, columns)
        self.absorb(n)
        self.attend(n, **options)
        self.end(n, columns)

    def forked(self, n: int) -> None:
        """A product on a second stream, beside the others."""
        self.second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.second):
            linear(self.x, self.qkv[n], self.rows["qkv"], columns=16)
        self.absorb(n)
        torch.cuda.current_stream().wait_stream(self.second)
        latent_rows(*self.rows.values())


def time_layer(queries: int, context: int, ways: Sequence[bool] = (False, True), num_layers: int | None = None) -> None:
    """Times one layer. num_layers 1: only runs what would be timed."""
    layers = Layers([context] * queries, num_layers)
    plain, blocks, large = (DecodeConfig(16, *what) for what in ((32, 4, 3, 1), (32, 4, 3, 4), (64, 4, 2, 1)))
    tiles = [(plain, 264), (plain, 132), (blocks, 264), (large, 132)]
    with overlapping(False):
        print(f"A {queries} context {context}: before: layer {layers.per_layer(layers.before):.1f} us")
    for wanted in ways:
        with overlapping(wanted):
            apart = (layers.absorb, layers.value_up, layers.forked)
            parts = ["absorb, value_up, forked " + " ".join(f"{layers.per_layer(launch):.1f}" for launch in apart)]
            for (config, programs), fuse in itertools.product(tiles, (False, True)):
                most = triton.cdiv(context, TILE_ROWS)
                size = triton.cdiv(most, max(1, min(most, programs // queries, 1 + extra_parts(queries) // queries)))
                if fuse and (queries > 4 or config is blocks):
                    continue
                parts_of_size = parts_on_gpu([context] * queries, HEADS, size)
                options = {"config": config, "parts": parts_of_size, "fuse": fuse}
                attend = layers.per_layer(lambda n, o=options: layers.attend(n, **o))
                whole = [layers.per_layer(lambda n, c=c, o=options: layers.whole(n, c, **o)) for c in (0, 16)]
                name = f"{config.block_n} rows x {config.parts}, {size} tiles a part{', fused' if fuse else ''}"
                parts.append(f"{name}: attend {attend:.1f} layer {whole[0]:.1f} {whole[1]:.1f}")
            parts.append(f"chosen: layer {layers.per_layer(lambda n: layers.whole(n, 0)):.1f}")
            print(f"  {'overlapping' if wanted else 'one by one'}: {'; '.join(parts)}", flush=True)


def time_products(tokens: int, num: int = 40) -> None:
    """Times products of few rows, by torch, then with several numbers of columns for a program."""
    sizes = {"qkv": (QUERY + WIDTH, HIDDEN), "q_b": (2560, QUERY), "o": (HIDDEN, 2560), "down": (HIDDEN, 768)}
    for name, (columns, depth) in sizes.items():
        w = normal(num, columns, depth)
        if name == "o":
            w = w.transpose(1, 2).contiguous().transpose(1, 2)
        x, out = normal(tokens, depth), normal(tokens, columns)
        times = [time_few(lambda n: torch.mm(x, w[n].t(), out=out), num)]  # noqa: B023
        cuts = ((8, 8), (16, 8), (32, 8)) if depth > 1024 else ((16, 8), (8, 4), (16, 4), (32, 4))
        for wanted, (width, parts) in itertools.product((False, True), cuts):
            with overlapping(wanted):
                cut = {"columns": width, "parts": parts}
                times.append(time_few(lambda n: linear(x, w[n], out, **cut), num))  # noqa: B023
        print(f"T {tokens} {name}: " + " ".join(f"{us:.1f}" for us in times))
    x, w = normal(tokens, HIDDEN), normal(num, 2, 768, HIDDEN)
    times = [time_few(lambda n: silu_mul(torch.mm(x, w[n].flatten(0, 1).t())), num)]
    for wanted, width in itertools.product((False, True), (4, 8, 16)):
        with overlapping(wanted):
            times.append(time_few(lambda n: gated(x, w[n], columns=width), num))  # noqa: B023
    print(f"T {tokens} gated: " + " ".join(f"{us:.1f}" for us in times), flush=True)


def time_few(launch: Callable[[int], object], num: int) -> float:
    if num == 1:
        launch(0)
        return 0.0
    return time_us([lambda n=n: launch(n) for n in range(num)])  # type: ignore[misc]


def main() -> int:
    start = time.perf_counter()
    found = try_all()
    broken = [job for job, what in found.items() if what not in ("", "too large")]
    for job in broken:
        print(f"BROKEN {job[0].__name__} {job[1:]}: {found[job]}")
    print(f"{len(found)} jobs in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(time.time_ns())
    checks = Checks()
    for wanted in (False, True):
        with overlapping(wanted):
            check_rows(checks)
            check_heads(checks)
            check_products(checks)
    check_attention(checks)
    print(f"checked after {time.perf_counter() - start:.0f} s: {checks.failed} wrong")
    time_rows()
    for tokens in FEW_ROWS:
        time_products(tokens)
    for queries, context in LAYERS:
        time_layer(queries, context)
        torch.cuda.empty_cache()
    print(f"timed after {time.perf_counter() - start:.0f} s", flush=True)
    for queries, heads, context in SHAPES:
        if time.perf_counter() - start < BUDGET_S:
            tiles = [c for c in configs(heads) if not found[run_tile, heads, c]]
            sweep(checks, tiles, queries, heads, context)
            torch.cuda.empty_cache()
    tiles = [job[1:] for job in broken if job[0] is run_tile]
    if tiles:
        diagnose(*tiles[0])
    print(f"{time.perf_counter() - start:.0f} s in all, {checks.failed} wrong, {len(broken)} broken")
    return int(checks.failed > 0 or bool(broken))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        heads, *tile = [int(n) for n in sys.argv[1].split(",")]
        print(tried((run_tile, heads, DecodeConfig(*tile[:5]))))
    else:
        sys.exit(main())
