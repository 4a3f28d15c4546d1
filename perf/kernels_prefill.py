"""Checks and times prefill attention on a GPU: `python -m perf.kernels_prefill`.

Every way of computing it is first compared with the plain torch reference (in float32, from the same inputs), on fresh
random numbers, into outputs full of NaN; a wrong result makes the exit code 1. Then each shape is timed with several
cuts of the work. Rates count only the pairs of query and key that the causal mask lets through. A layer's keys and
values are larger than the L2 cache.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton

from perf import prefill_sdpa
from perf.gpu_measure import error
from splash_plugins.mla_attention import prefill_hopper_kernel, prefill_reference
from splash_plugins.mla_attention.gather_kernel import gather_rows
from splash_plugins.mla_attention.prefill_kernel import Blocks, _prefill_kernel, prefill
from splash_plugins.mla_attention.reference import mla_prefill
from splash_plugins.mla_attention.tiles import NO_TILE, tiles_of

FLASH = (192, 64, 256)  # nope, rope, v of glm-4.7-flash
V3 = (128, 64, 128)  # of deepseek-v3
LATENT = 512
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-5}
CUTS = {
    FLASH: (
        Blocks(block_m=128, block_n=64, warps=8, stages=2, tma=True),
        Blocks(block_m=128, block_n=64, warps=8, stages=2),
        Blocks(block_m=128, block_n=32, warps=8, stages=3, tma=True),
        Blocks(block_m=64, block_n=64, warps=4, stages=2, tma=True),
        Blocks(block_m=64, block_n=64, warps=4, stages=1),
    ),
    V3: (
        Blocks(block_m=128, block_n=128, warps=8, stages=2, tma=True),
        Blocks(block_m=128, block_n=64, warps=8, stages=3, tma=True),
        Blocks(block_m=128, block_n=64, warps=8, stages=2, tma=True),
        Blocks(block_m=128, block_n=64, warps=8, stages=2),
        Blocks(block_m=64, block_n=64, warps=4, stages=2, tma=True),
    ),
}
HALVES = (torch.bfloat16, torch.float16)
COMPILERS = 14
DEADLINE = 150  # seconds
Way = Callable[["Case", bool], None]
# (head dims, blocks of the portable kernel or "hopper", dtype, whether results are float32, whether they are merged)
Task = tuple[tuple[int, int, int], "Blocks | str | None", torch.dtype, bool, bool]


@dataclass
class Case:
    name: str
    q: torch.Tensor
    position: torch.Tensor
    rows: torch.Tensor
    k_nope: torch.Tensor
    v: torch.Tensor
    segments: np.ndarray
    out: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        self.scale = self.q.shape[2] ** -0.5
        self.runs = prefill_sdpa.runs_of(self.segments, self.position.cpu().numpy())
        padding = np.full((2, 2), NO_TILE, np.int32)
        tiles = np.concatenate([tiles_of(self.segments), padding])
        self.index = [torch.from_numpy(a.astype(np.int32)).cuda() for a in (self.segments, tiles)]

    def arguments(self, merge: bool) -> tuple[object, ...]:
        inputs = (self.q, self.position, self.rows, self.k_nope, self.v, *self.index)
        return *inputs, self.scale, self.out, self.lse, merge

    def flops(self) -> float:
        position = self.position.cpu().numpy()
        pairs = sum(
            int(np.clip(position[begin:end] - first + 1, 0, key_end - key_begin).sum())
            for begin, end, key_begin, key_end, first in self.segments.tolist()
        )
        return 2.0 * float(pairs) * self.q.shape[1] * (self.q.shape[2] + self.v.shape[2])


def make_case(
    name: str, chunks: list[tuple[int, int]], heads: int, dims: tuple[int, int, int], dtype: torch.dtype
) -> Case:
    """A case with a segment for each (queries, keys); the queries are at the last of the keys' positions."""
    nope, rope, vd = dims
    segments: list[tuple[int, ...]] = []
    positions: list[np.ndarray] = []
    key = 0
    for num_queries, num_keys in chunks:
        query = sum(len(p) for p in positions)
        segments.append((query, query + num_queries, key, key + num_keys, 0))
        positions.append(np.arange(num_keys - num_queries, num_keys, dtype=np.int32))
        key += num_keys
    position = torch.from_numpy(np.concatenate(positions)).cuda()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    queries = len(position)
    return Case(
        name,
        draw(queries, heads, nope + rope),
        position,
        draw(key, LATENT + rope),
        draw(key, heads, nope),
        draw(key, heads, vd),
        np.array(segments, np.int32),
        torch.full((queries, heads, vd), torch.nan, dtype=dtype, device="cuda"),
        torch.full((queries, heads), torch.nan, device="cuda"),
    )


def triton_way(blocks: Blocks | None) -> Way:
    return lambda case, merge: prefill(*case.arguments(merge), blocks=blocks)  # type: ignore[arg-type, misc]


def hopper_way() -> Way:
    return lambda case, merge: prefill_hopper_kernel.prefill(*case.arguments(merge))  # type: ignore[arg-type]


def sdpa_way(backend: str) -> Way:
    return lambda case, merge: prefill_sdpa.prefill(  # type: ignore[misc]
        *case.arguments(merge), runs=case.runs, backend=backend  # type: ignore[arg-type]
    )  # fmt: skip


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def see(self, what: str, dtype: torch.dtype, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        worst = max(error(got, want) for got, want in pairs)
        if not worst <= TOLERANCE[dtype]:
            self.failed += 1
            print(f"WRONG {what} {dtype}: relative error {worst:.2e}")

    def whole(self, what: str, case: Case, way: Way) -> None:
        """Compares all results with the reference, computed at once and in three rounds that are merged."""
        dtype = case.q.dtype
        q, rows, k_nope, v = (t.float() for t in (case.q, case.rows, case.k_nope, case.v))
        wide_out, wide_lse = torch.empty_like(case.out, dtype=torch.float32), torch.empty_like(case.lse)
        want = Case(case.name, q, case.position, rows, k_nope, v, case.segments, wide_out, wide_lse)
        prefill_reference.prefill(*want.arguments(False))  # type: ignore[arg-type]
        way(case, False)
        self.see(f"{what} {case.name}", dtype, (case.out, want.out), (case.lse, want.lse))
        inputs = (case.q, case.position, case.rows, case.k_nope, case.v)
        out, lse = torch.full_like(case.out, torch.nan, dtype=torch.float32), torch.full_like(case.lse, torch.nan)
        for part in range(3):
            cut = case.segments.copy()
            length = case.segments[:, 3] - case.segments[:, 2]
            cut[:, 2] += length * part // 3
            cut[:, 4] += length * part // 3
            cut[:, 3] = case.segments[:, 2] + length * (part + 1) // 3
            way(Case(case.name, *inputs, cut, out, lse), part > 0)
        self.see(f"{what} {case.name} in rounds", dtype, (out, want.out), (lse, want.lse))

    def spots(self, what: str, case: Case) -> None:
        """Compares some queries of each segment with the reference."""
        nope = case.k_nope.shape[2]
        for begin, end, key_begin, key_end, first_key in case.segments.tolist():
            chosen = torch.randint(begin, end, (24,), device="cuda")
            keys = slice(key_begin, key_end)
            q = case.q[chosen, :4].float()
            want = mla_prefill(
                q[..., :nope], q[..., nope:], case.position[chosen], case.k_nope[keys, :4].float(),
                case.rows[keys, LATENT:].float(), case.v[keys, :4].float(), first_key, scale=case.scale,
            )  # fmt: skip
            got = case.out[chosen, :4], case.lse[chosen, :4]
            self.see(f"{what} {case.name}", case.q.dtype, *zip(got, want, strict=True))


def ways(dims: tuple[int, int, int]) -> Iterator[tuple[str, Way]]:
    for cut in CUTS[dims]:
        name = f"{cut.block_m}x{cut.block_n} w{cut.warps} s{cut.stages} {'tma' if cut.tma else 'ptr'}"
        yield name, triton_way(cut)
    yield "cudnn", sdpa_way("cudnn")
    if dims[2] == dims[0] + dims[1]:
        yield "flash2", sdpa_way("flash")


def compile_one(task: Task) -> None:
    """Compiles a kernel into Triton's cache, for the process that measures; runs nothing."""
    dims, way, dtype, wide, merge = task
    for kernel in (_prefill_kernel, prefill_hopper_kernel._prefill_hopper_kernel):
        kernel.run = partial(_only_compile, kernel.run)
    case = make_case("compile", [(130, 200)], 10, dims, dtype)
    if wide:
        case.out = case.out.float()
    hopper_way()(case, merge) if isinstance(way, str) else triton_way(way)(case, merge)


def _only_compile(run: Callable[..., object], *arguments: object, warmup: bool, **options: object) -> None:
    run(*arguments, warmup=True, **options)


def precompile() -> None:
    tasks: list[Task] = []
    for dims, cuts in CUTS.items():
        tasks += [(dims, cut, torch.bfloat16, False, False) for cut in cuts]
        results = ((False, False), (True, False), (True, True))
        tasks += [(dims, None, dtype, wide, merge) for dtype in TOLERANCE for wide, merge in results]
        tasks += [(dims, "hopper", dtype, *result) for dtype in HALVES for result in results]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks))


def check(checks: Checks) -> None:
    for dims in CUTS:
        for dtype in TOLERANCE:
            checks.whole("triton", small_case(dims, dtype), triton_way(None))
    for backend in ("cudnn", "flash"):
        case = make_case("small", [(256, 256), (128, 640)], 4, FLASH, torch.bfloat16)
        try:
            sdpa_way(backend)(case, False)
        except RuntimeError as reason:
            print(f"{backend} does not do it: {str(reason).splitlines()[0][:100]}")
            continue
        checks.spots(backend, case)
    pages = torch.randn((50, 3, 64, 576), device="cuda").bfloat16()[:, 1]
    page = torch.randint(-1, 50, (1000,), device="cuda", dtype=torch.int32)
    offset = torch.randint(0, 64, (1000,), device="cuda", dtype=torch.int32)
    out = torch.full((1000, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    gather_rows(pages, page, offset, out)
    want = pages[page.clamp(min=0).long(), offset.long()] * (page >= 0)[:, None]
    checks.see("gather_rows", torch.bfloat16, (out, want))


def small_case(dims: tuple[int, int, int], dtype: torch.dtype) -> Case:
    return make_case(f"small {dims}", [(300, 300), (1, 77), (130, 1000), (64, 64)], 5, dims, dtype)


def check_hopper(checks: Checks) -> None:
    for dims in CUTS:
        for dtype in HALVES:
            case = small_case(dims, dtype)
            assert prefill_hopper_kernel.supports(case.q, case.rows, case.k_nope, case.v)
            checks.whole("hopper", case, hopper_way())


def measure(checks: Checks, case: Case, ways: Iterable[tuple[str, Way]]) -> None:
    flops = case.flops()
    for name, way in ways:
        try:
            case.out.fill_(torch.nan)
            way(case, False)
            checks.spots(name, case)
            ms = triton.testing.do_bench(lambda way=way: way(case, False), warmup=15, rep=60, return_mode="median")
        except (RuntimeError, triton.runtime.errors.OutOfResources) as reason:
            print(f"{case.name:28} {name:22} {type(reason).__name__}: {str(reason).splitlines()[0][:80]}")
            continue
        print(f"{case.name:28} {name:22} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)


def main() -> int:
    begin = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    checks = Checks()
    precompile()
    print(f"compiled after {time.perf_counter() - begin:.0f} s")
    check(checks)
    print(f"checked after {time.perf_counter() - begin:.0f} s, {checks.failed} wrong", flush=True)
    shapes = (
        ("1 x 15000, h 10", [(15000, 15000)], 10, FLASH),
        ("1 x 15000, h 20", [(15000, 15000)], 20, FLASH),
        ("8 x 1024, h 20", [(1024, 1024)] * 8, 20, FLASH),
        ("16 x 512, h 20", [(512, 512)] * 16, 20, FLASH),
        ("4096 of 12000, h 10", [(4096, 12000)], 10, FLASH),
        ("1 x 8192, h 64, v3", [(8192, 8192)], 64, V3),
    )
    for name, chunks, heads, dims in shapes:
        measure(checks, make_case(name, chunks, heads, dims, torch.bfloat16), ways(dims))
    # Last, because a mistake in its barriers would make it hang.
    check_hopper(checks)
    print(f"checked after {time.perf_counter() - begin:.0f} s, {checks.failed} wrong", flush=True)
    for name, chunks, heads, dims in shapes:
        measure(checks, make_case(name, chunks, heads, dims, torch.bfloat16), [("hopper", hopper_way())])
    print(f"done after {time.perf_counter() - begin:.0f} s, {checks.failed} wrong")
    return int(checks.failed > 0)


if __name__ == "__main__":
    signal.alarm(DEADLINE)
    sys.exit(main())
