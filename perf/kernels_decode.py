"""Checks and times the kernels around decode attention on a GPU: `python -m perf.kernels_decode`.

Every kernel is first compared with its plain torch reference in bfloat16, float16 and float32, on fresh random numbers,
into outputs full of NaN; a wrong result makes the exit code 1. Then CUDA graphs of several launches are replayed, and
the median is printed. Attention reads another layer in every launch, so that no launch finds its rows in the L2.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from splash_plugins.latent_rows import reference as latent_reference
from splash_plugins.latent_rows.kernel import latent_rows
from splash_plugins.mla_attention import decode_reference
from splash_plugins.mla_attention.decode_kernel import DecodeConfig, choose_config, decode
from splash_plugins.norm import reference as norm_reference
from splash_plugins.norm.kernel import add_norm
from splash_plugins.rope_q import reference as rope_reference
from splash_plugins.rope_q.kernel import rope_q

BANDWIDTH = 4.3e12  # bytes/s that a copy reaches on an H200, read and written
LATENT, WIDTH, PAGE_TOKENS, SCALE = 512, 576, 64, 256**-0.5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Relative error ‖out − reference‖ / ‖reference‖ that rounding explains.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SHAPES = (
    (1, 10, 600),
    (1, 20, 15000),
    (1, 10, 15000),
    (16, 20, 600),
    (64, 20, 640),
    (128, 20, 640),
    (256, 20, 640),
    (512, 10, 640),
    (512, 64, 640),
    (8, 128, 8192),
)
# Rows a tile, warps, stages.
TILES = ((16, 4, 4), (32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 8, 2))
COMPILERS = 12


def configs(heads: int) -> list[DecodeConfig]:
    """Sums [L, block_h] of 64 heads need the registers of 8 warps."""
    most = min(64, max(16, triton.next_power_of_2(heads)))
    blocks = [most] if most <= 16 else [most // 2, most]
    found = [DecodeConfig(h, n, max(warps, h // 8), stages, 1) for h in blocks for n, warps, stages in TILES]
    return list(dict.fromkeys(found))


@dataclass
class Attention:
    """Queries, and the pages of several layers that hold their contexts; `layers` are views of one layer each."""

    q: torch.Tensor
    layers: list[torch.Tensor]
    tables: torch.Tensor
    slot: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def run(self, function: Callable[..., None], layer: int = 0, **options: Any) -> None:
        index = (self.tables, self.slot, self.first, self.length)
        function(self.q, self.layers[layer], *index, 1, LATENT, SCALE, self.out, self.lse, **options)


def attention(lengths: Sequence[int], heads: int, dtype: torch.dtype, num_layers: int, spare: int = 8) -> Attention:
    """Pages in random order; NaN where no query may read. Tables have `spare` times the columns that are in use."""
    used = [-(-n // PAGE_TOKENS) for n in lengths]
    num_pages = sum(used) + 1
    arena = torch.empty((num_pages, num_layers, PAGE_TOKENS, WIDTH), dtype=dtype, device="cuda").normal_()
    order = torch.randperm(num_pages).tolist()
    tables = torch.full((len(lengths), max(1, *used) * spare), -1, dtype=torch.int32)
    for a, n in enumerate(lengths):
        for column in range(used[a]):
            tables[a, column] = order.pop()
        if n % PAGE_TOKENS:
            arena[tables[a, used[a] - 1], :, n % PAGE_TOKENS :] = torch.nan
    slot = torch.tensor([a if n else -1 for a, n in enumerate(lengths)], dtype=torch.int32)
    q = torch.randn((len(lengths), heads, WIDTH), device="cuda").to(dtype)
    out = torch.full((len(lengths), heads, LATENT), torch.nan, dtype=dtype, device="cuda")
    lse = torch.full((len(lengths), heads), torch.nan, device="cuda")
    length = torch.tensor(lengths, dtype=torch.int32)
    layers = [arena[:, layer] for layer in range(num_layers)]
    return Attention(q, layers, tables.cuda(), slot.cuda(), torch.zeros_like(slot).cuda(), length.cuda(), out, lse)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, infinite where one is not finite and the other is."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def see(self, what: str, dtype: torch.dtype, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        worst = max(error(got, want) for got, want in pairs)
        good = worst <= TOLERANCE[dtype]
        self.failed += not good
        if not good:
            print(f"WRONG {what} {dtype}: relative error {worst:.2e}")

    def attention(self, what: str, case: Attention, want: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
        case.out.fill_(torch.nan)
        case.lse.fill_(torch.nan)
        case.run(decode, **options)
        self.see(f"decode {what} {options}", case.q.dtype, ((case.out, want[0]), (case.lse, want[1])))


def attention_wanted(case: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output and log-sum-exp from the same inputs in float32."""
    wide = replace(case, q=case.q.float(), layers=[case.layers[0].float()], out=torch.empty_like(case.out).float())
    wide.lse = torch.empty_like(case.lse)
    wide.run(decode_reference.decode)
    return wide.out, wide.lse


def check_attention(checks: Checks) -> None:
    for dtype, heads in itertools.product(DTYPES, (10, 20, 64)):
        if dtype == torch.float32 and heads > 10:
            continue  # one way through the kernel, slow to compile
        case = attention([0, 1, 63, 64, 65, 600, 1000, 0], heads, dtype, 1)
        want = attention_wanted(case)
        for splits in (None, 1, 3):
            checks.attention(f"ragged, {heads} heads", case, want, num_splits=splits)


def norm_inputs(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, device="cuda").to(dtype) for shape in ((tokens, 2048), (tokens, 2048), (2048,)))


def latent_inputs(tokens: int, dtype: torch.dtype, num_q: int = 768) -> dict[str, Any]:
    """Arguments of latent_rows in order."""
    angle = torch.rand((tokens, 32), device="cuda") * 100
    places = torch.randperm(tokens * 2, device="cuda")[:tokens]
    page, offset = (places // PAGE_TOKENS).int(), (places % PAGE_TOKENS).int()
    page[1::5] = -1
    num_pages = -(-tokens * 2 // PAGE_TOKENS)
    arena = torch.zeros((num_pages, 2, PAGE_TOKENS, WIDTH), dtype=dtype, device="cuda")
    return {
        "qkv": torch.randn((tokens, num_q + WIDTH), device="cuda").to(dtype),
        "q_norm": torch.randn(num_q, device="cuda").to(dtype),
        "kv_norm": torch.randn(LATENT, device="cuda").to(dtype),
        "eps": 1e-6,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "interleaved": True,
        "latent": torch.full((tokens, num_q), torch.nan, dtype=dtype, device="cuda"),
        "rows": torch.full((tokens, WIDTH), torch.nan, dtype=dtype, device="cuda"),
        "pages": arena[:, 1],
        "page": page,
        "offset": offset,
        "target_page": None,
        "target_offset": None,
    }


def rope_inputs(tokens: int, dtype: torch.dtype, heads: int = 20) -> tuple[torch.Tensor, ...]:
    """q, cos, sin and the absorbed queries of at most 512 tokens."""
    angle = torch.rand((tokens, 32), device="cuda") * 100
    q = torch.randn((tokens, heads, 256), device="cuda").to(dtype)
    absorbed = torch.zeros((min(tokens, 512), heads, WIDTH), dtype=dtype, device="cuda")
    return q, angle.cos(), angle.sin(), absorbed


def check_rows(checks: Checks) -> None:
    """The norm, the latent rows and the rotation."""
    for dtype, tokens in itertools.product(DTYPES, (1, 77)):
        hidden, delta, weight = norm_inputs(tokens, dtype)
        want_hidden, want, out = hidden.clone(), torch.empty_like(hidden), torch.full_like(hidden, torch.nan)
        norm_reference.add_norm(want_hidden, delta, weight, 1e-5, want)
        add_norm(hidden, delta, weight, 1e-5, out)
        checks.see("add_norm", dtype, ((hidden, want_hidden), (out, want)))
        for interleaved in (False, True):
            mine = {**latent_inputs(tokens, dtype), "interleaved": interleaved}
            theirs: dict[str, Any] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in mine.items()}
            latent_rows(*mine.values())
            latent_reference.latent_rows(*theirs.values())
            pairs = [(mine[k], theirs[k]) for k in ("latent", "rows", "pages")]
            checks.see("latent_rows", dtype, pairs)
            q, cos, sin, absorbed = rope_inputs(tokens, dtype)
            want_q, want_absorbed = q.clone(), absorbed.clone()
            rope_reference.rope_q(want_q, cos, sin, interleaved, 192, want_absorbed)
            rope_q(q, cos, sin, interleaved, 192, absorbed)
            checks.see("rope_q", dtype, ((q, want_q), (absorbed, want_absorbed)))


def time_us(launches: Sequence[Callable[[], None]], replays: int = 20) -> float:
    """Median microseconds of one of the launches, all in one graph."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2] * 1e3 / len(launches)


def compile_in_child(job: tuple[int, DecodeConfig]) -> None:
    """Leaves the kernels in Triton's cache on disk."""
    heads, config = job
    case = attention([300], heads, torch.bfloat16, 2)
    try:
        for splits in (1, 2):
            case.run(decode, config=config, num_splits=splits)
        torch.cuda.synchronize()
    except OutOfResources:
        pass


def sweep(checks: Checks, queries: int, heads: int, context: int) -> None:
    rows = queries * context
    num_layers = max(2, min(256, int(300e6 / (rows * WIDTH * 2))))
    case = attention([context] * queries, heads, torch.bfloat16, num_layers)
    want = attention_wanted(case)
    properties = torch.cuda.get_device_properties(0)
    optin = getattr(properties, "shared_memory_per_block_optin", 0)
    chosen = choose_config(heads, 2, optin, properties.major == 9)
    results = []
    for config in dict.fromkeys([chosen, *configs(heads)]):
        programs = queries * triton.cdiv(heads, config.block_h)
        tiles = triton.cdiv(context, config.block_n)
        fill = [max(1, round(f * properties.multi_processor_count) // programs) for f in (0.5, 1, 2, 4)]
        for splits in sorted({1, *(min(tiles, s) for s in fill)} if programs > 32 else {min(tiles, s) for s in fill}):
            options = {"config": config, "num_splits": splits}
            try:
                checks.attention(f"{queries, heads, context}", case, want, **options)
            except OutOfResources:
                break
            launches = [lambda n=n, o=options: case.run(decode, n, **o) for n in range(num_layers)]  # type: ignore[misc]
            results.append((time_us(launches), config, splits))
    own = time_us([lambda n=n: case.run(decode, n) for n in range(num_layers)])  # type: ignore[misc]
    best = sorted(results, key=lambda r: r[0])[:4]
    label = f"{queries, heads, context}"
    print(f"{label:18} chosen  {speed(own, rows * WIDTH * 2)}  {tile_name(chosen)}")
    for us, config, splits in best:
        print(f"{'':18} swept   {speed(us, rows * WIDTH * 2)}  {tile_name(config)} splits {splits}")


def tile_name(config: DecodeConfig) -> str:
    return f"heads {config.block_h} rows {config.block_n} warps {config.num_warps} stages {config.num_stages}"


def speed(us: float, num_bytes: float) -> str:
    rate = num_bytes / us * 1e6
    return f"{us:8.1f} us {rate / 1e9:7.0f} GB/s {100 * rate / BANDWIDTH:5.1f} %"


def time_rows() -> None:
    """Repeated on one set of tensors: in a step, too, a launch finds in the L2 what the one before it wrote."""
    repeats = 20
    for tokens in (1, 16, 512, 8192):
        hidden, delta, weight = norm_inputs(tokens, torch.bfloat16)
        out = torch.empty_like(hidden)
        us = time_us([lambda: add_norm(hidden, delta, weight, 1e-5, out)] * repeats)  # noqa: B023
        print(f"add_norm    T {tokens:5} {speed(us, tokens * 2048 * 2 * 4)}")
        arguments = latent_inputs(tokens, torch.bfloat16).values()
        us = time_us([lambda: latent_rows(*arguments)] * repeats)  # noqa: B023
        print(f"latent_rows T {tokens:5} {speed(us, tokens * 2 * (2 * 768 + 3 * WIDTH))}")
        q, cos, sin, absorbed = rope_inputs(tokens, torch.bfloat16)
        us = time_us([lambda: rope_q(q, cos, sin, True, 192, absorbed)] * repeats)  # noqa: B023
        print(f"rope_q      T {tokens:5} {speed(us, 20 * 64 * 2 * (2 * tokens + len(absorbed)))}")


def main() -> int:
    start = time.perf_counter()
    jobs = [(heads, config) for heads in sorted({s[1] for s in SHAPES}) for config in configs(heads)]
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_in_child, jobs))
    print(f"compiled in {time.perf_counter() - start:.0f} s")
    torch.manual_seed(time.time_ns())
    checks = Checks()
    check_rows(checks)
    check_attention(checks)
    print(f"checked after {time.perf_counter() - start:.0f} s: {checks.failed} wrong")
    time_rows()
    for queries, heads, context in SHAPES:
        sweep(checks, queries, heads, context)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s in all, {checks.failed} wrong")
    return int(checks.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
