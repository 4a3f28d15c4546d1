"""Checks and times the router, with many cuts of its product, on a GPU: `python -m perf.kernels_router`.

T tokens, D hidden, E experts, k choices a token. Each cut is first compared with the plain torch reference, into
poisoned outputs: on fresh random numbers, and on small integers, whose logits are exact and have many ties; there,
without groups, every choice must be the reference's. A wrong result makes the exit code 1. Times are medians over
replays of a CUDA graph of many launches. Up to 2,048 tokens, each launch has router weights that are not in the L2
cache, and one of two sets of rows that are. `before` is the cut that was used before there was tiles.py, but with
today's way of choosing; `torch` is torch's product with float32 results, and choose().
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from perf.expert_cases import GLM, GPU, Checks, Shape, rules, time_us
from splash_plugins import overlap_kernel
from splash_plugins.grouped_experts.device import limits
from splash_plugins.router import reference
from splash_plugins.router.kernel import choose, route
from splash_plugins.router.tiles import Tiles, choose_tiles, fit
from splash_trt.models.config import Experts

DEEPSEEK = Shape("deepseek-v3", 7168, 2048, replace(rules(8, 8, 4), num_experts=256), 32)
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COLD_BYTES = 80e6  # more than the L2 holds
BUDGET_S = 54  # no new case is begun after this many seconds
COMPILERS = 15
CHOOSE_ROWS = (1, 2, 4, 8)

# For up to so many tokens: cuts (rows, columns, block of D, warps, stages), each with the numbers of slices to try.
Cuts = tuple[tuple[int, tuple[tuple[tuple[int, int, int, int, int], tuple[int, ...]], ...]], ...]
FUSED = 0  # as a number of slices: one launch
NARROW: Cuts = (
    (16, (((16, 64, 128, 4, 4), (8, 16)), ((16, 32, 128, 4, 4), (8, 16)), ((16, 64, 128, 2, 4), (16,)))),
    (
        128,
        (
            ((16, 64, 128, 4, 4), (8, 16)),
            ((16, 32, 128, 4, 4), (8, 16)),
            ((32, 64, 128, 4, 4), (8, 16)),
            ((64, 64, 128, 4, 4), (8, 16)),
            ((64, 32, 128, 4, 4), (16,)),
        ),
    ),
    (
        512,
        (
            ((16, 64, 128, 4, 4), (4, 8)),
            ((32, 64, 128, 4, 4), (4, 8, 16)),
            ((64, 64, 128, 4, 4), (4, 8, 16)),
            ((64, 32, 128, 4, 4), (4, 8)),
            ((128, 64, 128, 8, 3), (8, 16)),
        ),
    ),
    (
        4096,
        (
            ((32, 64, 128, 4, 4), (1, 2, 4)),
            ((64, 64, 128, 4, 4), (1, 2, 4, 8)),
            ((64, 64, 64, 4, 6), (2, 4)),
            ((128, 64, 128, 8, 3), (2, 4, 8)),
            ((64, 64, 128, 4, 4), (FUSED,)),
            ((16, 64, 256, 1, 3), (FUSED,)),
        ),
    ),
    (
        1 << 60,
        (
            ((64, 64, 128, 4, 4), (1, 2, FUSED)),
            ((64, 64, 64, 4, 6), (1, FUSED)),
            ((64, 64, 128, 4, 3), (FUSED,)),
            ((128, 64, 128, 8, 3), (1, 2, FUSED)),
            ((128, 64, 64, 8, 4), (1, FUSED)),
        ),
    ),
)
WIDE: Cuts = (
    (16, (((16, 64, 128, 4, 4), (28, 14)), ((16, 32, 128, 4, 4), (28, 14)), ((16, 128, 128, 8, 4), (28,)))),
    (
        128,
        (
            ((16, 64, 128, 4, 4), (14, 28)),
            ((32, 64, 128, 4, 4), (7, 14, 28)),
            ((64, 64, 128, 4, 4), (7, 14)),
            ((64, 128, 64, 4, 5), (14, 28)),
        ),
    ),
    (
        512,
        (
            ((32, 64, 128, 4, 4), (4, 7)),
            ((64, 64, 128, 4, 4), (4, 7)),
            ((64, 128, 64, 4, 5), (4, 8, 16)),
            ((128, 128, 64, 8, 4), (8, 16)),
        ),
    ),
    (
        1 << 60,
        (
            ((64, 128, 64, 4, 5), (1, 2, 4)),
            ((128, 128, 64, 8, 4), (1, 2, 4)),
            ((128, 256, 64, 8, 3), (1, 2, 4)),
            ((64, 256, 64, 8, 4), (1, 2, 4)),
        ),
    ),
)


@dataclass
class Case:
    """Several routers and two sets of rows. whole: all numbers are small integers (the router's, multiples of 1/32)."""

    shape: Shape
    tokens: int
    whole: bool = False
    routers: int = 1

    def __post_init__(self) -> None:
        shape, num = self.shape, self.shape.rules.num_experts
        self.num_tokens = torch.tensor([self.tokens], dtype=torch.int32, device=GPU)
        self.choice = torch.empty(self.tokens, shape.top_k, dtype=torch.int32, device=GPU)
        self.weight = torch.empty(self.tokens, shape.top_k, device=GPU)
        self.bias = torch.zeros(num, device=GPU) if self.whole else torch.rand(num, device=GPU) / 8
        self.x = self._numbers(2, self.tokens)
        self.router = self._numbers(self.routers, num).div_(32 if self.whole else shape.hidden**0.5)

    def _numbers(self, sets: int, rows: int) -> torch.Tensor:
        sizes = (sets, rows, self.shape.hidden)
        if self.whole:
            return torch.randint(-1, 2, sizes, device=GPU).to(torch.bfloat16)
        return torch.randn(sizes, device=GPU, dtype=torch.bfloat16)

    @property
    def rules(self) -> Experts:
        return self.shape.rules

    def run(self, n: int = 0, tiles: Tiles | None = None) -> None:
        x, router = self.x[n % 2], self.router[n % self.routers]
        route(x, router, self.bias, self.rules, self.num_tokens, self.choice, self.weight, tiles)

    def run_torch(self, n: int) -> None:
        logits = torch.mm(self.x[n % 2], self.router[n % self.routers].t(), out_dtype=torch.float32)
        choose(logits, self.bias, self.rules, self.num_tokens, self.choice, self.weight)

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        choice, weight = torch.empty_like(self.choice), torch.empty_like(self.weight)
        reference.route(self.x[0], self.router[0], self.bias, self.rules, self.num_tokens, choice, weight)
        return choice, weight

    def check(self, checks: Checks, what: str, tiles: Tiles | None, want: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Compares with the reference. Random numbers may be chosen differently where rankings, or sums of groups, are
        closer than rounding."""
        self.choice.fill_(-7)
        self.weight.fill_(torch.nan)
        self.run(0, tiles)
        same = (self.choice == want[0]).all(1)
        exact = self.whole and self.rules.num_groups == 1
        allowed = 0.0 if exact else max(2e-3, 0.5 / self.tokens)
        if float((~same).float().mean()) > allowed:
            checks.failed += 1
            print(f"WRONG {what}: {int((~same).sum())} of {self.tokens} rows choose others", flush=True)
        checks.see(what, self.weight[same], want[1][same], 1e-4)


def held(shape: Shape) -> tuple[int, int, int]:
    """(groups, columns, numbers of a row): arguments of choose_tiles and fit."""
    return shape.rules.num_groups, shape.rules.num_experts, shape.hidden


def chosen(shape: Shape, tokens: int) -> Tiles:
    return choose_tiles(tokens, *held(shape), 2, limits(GPU).shared_bytes)


def before(shape: Shape, tokens: int) -> Tiles:
    """The former cut: by 16 rows, or 64 from 4,096 tokens on, and with slices up to 1,024 tokens."""
    narrow = shape.rules.num_experts <= 128
    slices = min(shape.hidden // 256, 128 // -(-tokens // 16)) if tokens <= 1024 else 1
    many = tokens >= 4096
    cut = Tiles(
        rows=64 if many else 16,
        columns=256,
        block_k=128 if narrow else 64,
        warps=8 if many else 4,
        stages=4,
        slices=max(1, slices),
        fused=narrow and slices == 1,
        choose_rows=4 if narrow else 1,
    )
    return fit(cut, *held(shape), 2, limits(GPU).shared_bytes)


def cuts(shape: Shape, tokens: int) -> Iterator[Tiles]:
    forms = NARROW if shape.rules.num_experts <= 128 else WIDE
    for (rows, columns, block_k, warps, stages), slices in next(f[1] for f in forms if tokens <= f[0]):
        for n in slices:
            tiles = Tiles(
                rows=rows,
                columns=columns,
                block_k=block_k,
                warps=warps,
                stages=stages,
                slices=max(1, n),
                fused=n == FUSED,
                choose_rows=1 if tokens <= 512 else 2,
            )
            yield fit(tiles, *held(shape), 2, limits(GPU).shared_bytes)


def name(tiles: Tiles) -> str:
    how = "one launch" if tiles.fused else f"{tiles.slices} slices, choose {tiles.choose_rows}"
    return f"{tiles.rows}x{tiles.columns}x{tiles.block_k} w{tiles.warps} s{tiles.stages} {how}"


Job = tuple[Shape, Tiles | None, bool]  # None: torch's product; whether launches overlap


def jobs() -> list[Job]:
    """Everything that is launched, each kernel of a product once: the number of tokens does not specialise kernels."""
    found: dict[Job, None] = {(shape, None, True): None for shape in (GLM, DEEPSEEK)}
    for shape, tokens in itertools.product((GLM, DEEPSEEK), TOKENS):
        for tiles in (chosen(shape, tokens), before(shape, tokens), *cuts(shape, tokens)):
            found[(shape, tiles, True)] = None
        found[(shape, chosen(shape, tokens), False)] = None
    return list(found)


def choosers(todo: list[Job]) -> list[Job]:
    """Jobs for all ways of choosing from each number of slices, with products that are compiled already."""
    found: dict[tuple[Shape, int], Tiles] = {}
    for shape, tiles, overlapping in todo:
        if tiles and overlapping and not tiles.fused:
            found[(shape, tiles.slices)] = tiles
    return [(shape, other, True) for (shape, _), tiles in found.items() for other in choosing(shape, tiles)]


def choosing(shape: Shape, tiles: Tiles) -> list[Tiles]:
    """The tiles with other numbers of tokens for a program that chooses, as far as its registers hold them."""
    room = min(8192 // tiles.slices, 1024) // shape.rules.num_experts
    return [replace(tiles, choose_rows=n) for n in CHOOSE_ROWS if n <= max(1, room)]


def tried(job: Job) -> str:
    """Runs a job on one row, which puts its kernels into Triton's cache on disk. Returns what went wrong, or an empty
    string."""
    shape, tiles, overlap_kernel.BY_DEFAULT = job
    case = Case(shape, 1)
    try:
        if tiles is None:
            case.run_torch(0)
        else:
            case.run(0, tiles)
        torch.cuda.synchronize()
    except OutOfResources:
        return "too large"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def time_all(shape: Shape, tokens: int, checks: Checks, unfit: set[Any]) -> str:
    """Lines of the output: the chosen cut's time, those that it is compared with, and the three best cuts."""
    few = tokens <= 2048
    router_bytes = shape.rules.num_experts * shape.hidden * 2
    case = Case(shape, tokens, routers=int(COLD_BYTES // router_bytes) + 1 if few else 4)
    exact = Case(shape, min(tokens, 1000), whole=True)
    for each in (case, exact):
        each.num_tokens.sub_(each.tokens // 8)
    want, want_exact = case.wanted(), exact.wanted()
    launches = case.routers if few else 10

    def measure(tiles: Tiles) -> float:
        if (shape, tiles) in unfit:
            return float("inf")
        what = f"{shape.name} T {tokens} {name(tiles)}"
        case.num_tokens.fill_(tokens - tokens // 8)
        case.check(checks, what, tiles, want)
        exact.check(checks, f"{what}, exact", tiles, want_exact)
        case.num_tokens.fill_(tokens)
        return time_us([lambda n=n: case.run(n, tiles) for n in range(launches)], 0.012)  # type: ignore[misc]

    own = chosen(shape, tokens)
    times = {tiles: measure(tiles) for tiles in dict.fromkeys((own, before(shape, tokens), *cuts(shape, tokens)))}
    best = min(times, key=lambda tiles: times[tiles])
    if not best.fused:
        times.update({tiles: measure(tiles) for tiles in choosing(shape, best) if tiles not in times})
    overlap_kernel.BY_DEFAULT = False
    alone = measure(own)
    overlap_kernel.BY_DEFAULT = True
    by_torch = float("inf")
    if (shape, None) not in unfit:
        by_torch = time_us([lambda n=n: case.run_torch(n) for n in range(launches)], 0.012)  # type: ignore[misc]
    order = sorted(times, key=lambda tiles: times[tiles])[:3]
    first = f"{shape.name} T {tokens:5}: chosen {times[own]:6.1f} us (one by one {alone:6.1f})"
    first += f"  before {times[before(shape, tokens)]:6.1f}  torch {by_torch:6.1f}"
    return "\n".join([first, f"    chosen {name(own)}", *(f"    {times[t]:6.1f} {name(t)}" for t in order)])


def main() -> int:
    start = time.perf_counter()
    torch.cuda.init()
    todo = jobs()
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(todo, pool.map(tried, todo, chunksize=1), strict=True))
        others = choosers(todo)
        found.update(zip(others, pool.map(tried, others, chunksize=1), strict=True))
    checks = Checks()
    for (shape, tiles, _), what in found.items():
        if what:
            checks.failed += tiles is not None and what != "too large"
            print(f"{shape.name} {name(tiles) if tiles else 'torch'}: {what}")
    print(f"compiled {len(found)} in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(time.time_ns())
    unfit = {(shape, tiles) for (shape, tiles, _), what in found.items() if what}
    for shape, tokens in itertools.product((GLM, DEEPSEEK), TOKENS):
        if time.perf_counter() - start > BUDGET_S:
            print(f"{shape.name} T {tokens}: out of time")
            continue
        print(time_all(shape, tokens, checks, unfit), flush=True)
    print(f"{checks.failed} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
