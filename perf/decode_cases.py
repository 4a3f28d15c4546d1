"""The inputs of perf/kernels_decode.py, for kernels around decode attention; and how these are checked and timed.

Sizes are those of glm-4.7-flash. Every kernel is compared with its plain torch reference, on fresh random numbers and
into outputs full of NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from perf.gpu_measure import captured, error, median_us
from splash_plugins.absorb import reference as absorb_reference
from splash_plugins.absorb.kernel import absorb
from splash_plugins.few_rows import reference as few_reference
from splash_plugins.few_rows.kernel import gated, linear
from splash_plugins.latent_rows import reference as latent_reference
from splash_plugins.latent_rows.kernel import latent_rows
from splash_plugins.mla_attention import decode_reference
from splash_plugins.mla_attention.cut import Parts, cut, num_sms_of, parts_of
from splash_plugins.mla_attention.decode_kernel import decode
from splash_plugins.norm import reference as norm_reference
from splash_plugins.norm.kernel import add_norm
from splash_plugins.rope_q import reference as rope_reference
from splash_plugins.rope_q.kernel import rope_q
from splash_plugins.value_up import reference as value_reference
from splash_plugins.value_up.kernel import decode_values, value_up

NOPE, ROPE, VALUE, LATENT, WIDTH, PAGE_TOKENS, SCALE = 192, 64, 256, 512, 576, 64, 256**-0.5
UNCUT = 1000  # tiles of a part, more than any context has
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The relative error ‖out − reference‖ / ‖reference‖ that rounding can explain.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass
class Attention:
    """Queries, and pages of several layers with their contexts. layers: one view of the pages for each layer."""

    q: torch.Tensor
    layers: list[torch.Tensor]
    tables: torch.Tensor
    slot: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    parts: Parts
    stride: int = 1

    def index(self, layer: int = 0, parts: Parts | None = None) -> tuple[Any, ...]:
        """The arguments of decode kernels from the layer's pages to the scale. parts: None for those that the host
        cuts."""
        index = (self.layers[layer], self.tables, self.slot, self.first, self.length)
        return *index, parts or self.parts, self.stride, LATENT, SCALE

    def run(self, function: Callable[..., None], layer: int = 0, parts: Parts | None = None, **options: Any) -> None:
        function(self.q, *self.index(layer, parts), self.out, self.lse, **options)


def parts_on_gpu(lengths: Sequence[int], heads: int, size: int | None = None) -> Parts:
    """The parts of contexts as the host cuts them, or with at most `size` tiles each."""
    length = np.array(lengths, np.int32)
    found = cut(length, heads, num_sms_of(torch.device("cuda"))) if size is None else parts_of(length, size)
    return Parts(*(torch.from_numpy(array).cuda() for array in found))


def attention(
    lengths: Sequence[int],
    heads: int,
    dtype: torch.dtype,
    num_layers: int,
    spare: int = 8,
    stride: int = 1,
    page_tokens: int = PAGE_TOKENS,
) -> Attention:
    """Queries with contexts of these lengths. Pages are in random order, and NaN where no query may read. Tables have
    `spare` times as many columns as are used; a query reads every stride-th column."""
    used = [-(-n // page_tokens) for n in lengths]
    num_pages = sum(used) + 1
    arena = torch.empty((num_pages, num_layers, page_tokens, WIDTH), dtype=dtype, device="cuda").normal_()
    order = torch.randperm(num_pages).tolist()
    tables = torch.full((len(lengths), max(1, *used) * spare * stride), -1, dtype=torch.int32)
    first = torch.arange(len(lengths), dtype=torch.int32) % stride
    for a, n in enumerate(lengths):
        pages = torch.tensor([order.pop() for _ in range(used[a])], dtype=torch.int32)
        tables[a, int(first[a]) : int(first[a]) + used[a] * stride : stride] = pages
        if n % page_tokens:
            arena[pages[-1], :, n % page_tokens :] = torch.nan
    slot = torch.tensor([a if n else -1 for a, n in enumerate(lengths)], dtype=torch.int32)
    q = torch.randn((len(lengths), heads, WIDTH), device="cuda").to(dtype)
    out = torch.full((len(lengths), heads, LATENT), torch.nan, dtype=dtype, device="cuda")
    lse = torch.full((len(lengths), heads), torch.nan, device="cuda")
    length = torch.tensor(lengths, dtype=torch.int32)
    layers = [arena[:, layer] for layer in range(num_layers)]
    index = [x.cuda() for x in (tables, slot, first, length)]
    return Attention(q, layers, *index, out, lse, parts_on_gpu(lengths, heads), stride)


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def see(self, what: str, dtype: torch.dtype, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        worst = max(error(got, want) for got, want in pairs)
        good = worst <= TOLERANCE[dtype]
        self.failed += not good
        if not good:
            print(f"WRONG {what} {dtype}: relative error {worst:.2e}")

    def attention(
        self, what: str, case: Attention, want: tuple[torch.Tensor, torch.Tensor], size: int | None, **options: Any
    ) -> None:
        """Compares decode with `want`. size: most tiles of a part; None: as the host cuts."""
        case.out.fill_(torch.nan)
        case.lse.fill_(torch.nan)
        parts = parts_on_gpu(case.length.tolist(), case.q.shape[1], size)
        case.run(decode, parts=parts, **options)
        self.see(f"decode {what} {size} {options}", case.q.dtype, ((case.out, want[0]), (case.lse, want[1])))


def attention_wanted(case: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output and log-sum-exp from the same inputs in float32."""
    wide = replace(case, q=case.q.float(), layers=[case.layers[0].float()], out=torch.empty_like(case.out).float())
    wide.lse = torch.empty_like(case.lse)
    wide.run(decode_reference.decode)
    return wide.out, wide.lse


def check_attention(checks: Checks, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    for dtype, heads in itertools.product(dtypes, (10, 20, 64)):
        if dtype == torch.float32 and heads > 10:
            continue  # float32 takes one path through the kernel and is slow to compile
        case = attention([0, 1, 63, 64, 65, 600, 1000, 0], heads, dtype, 1)
        want = attention_wanted(case)
        for size in (None, UNCUT, 3):
            checks.attention(f"ragged, {heads} heads", case, want, size)


def norm_inputs(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, device="cuda").to(dtype) for shape in ((tokens, 2048), (tokens, 2048), (2048,)))


def latent_inputs(tokens: int, dtype: torch.dtype, num_q: int = 768) -> dict[str, Any]:
    """Arguments of latent_rows, in their order."""
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
    """Arguments of rope_q: q, cos, sin, and absorbed queries of at most 512 tokens."""
    angle = torch.rand((tokens, 32), device="cuda") * 100
    q = torch.randn((tokens, heads, 256), device="cuda").to(dtype)
    absorbed = torch.zeros((min(tokens, 512), heads, WIDTH), dtype=dtype, device="cuda")
    return q, angle.cos(), angle.sin(), absorbed


def check_rows(checks: Checks, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Checks the norm, the latent rows and the rotation."""
    for dtype, tokens in itertools.product(dtypes, (1, 77)):
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


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def check_heads(checks: Checks, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Checks products by head: absorbed queries, and values, alone and together with attention to parts of contexts."""
    for dtype, queries in itertools.product(dtypes, (1, 16, 61, 100)):
        q, cos, sin, got = rope_inputs(queries, dtype, 10)
        w_uk = normal(10, NOPE, LATENT, dtype=dtype, scale=NOPE**-0.5)
        want = torch.empty_like(got)
        absorb_reference.absorb(q, cos, sin, True, w_uk, want)
        got.fill_(torch.nan)
        absorb(q, cos, sin, True, w_uk, got)
        checks.see(f"absorb {queries}", dtype, ((got, want),))
        w_uv = normal(10, VALUE, LATENT, dtype=dtype, scale=LATENT**-0.5)
        latents = normal(queries, 10, LATENT, dtype=dtype)
        out, wanted = (torch.full((queries, 10, VALUE), torch.nan, dtype=dtype, device="cuda") for _ in range(2))
        value_reference.value_up(latents, w_uv, wanted)
        value_up(latents, w_uv, out)
        checks.see(f"value_up {queries}", dtype, ((out, wanted),))
        case = attention([0, 1, 63, 64, 65, 600, 1000, 0][: queries + 1], 10, dtype, 1)
        out, wanted = out[:1].repeat(len(case.q), 1, 1), wanted[:1].repeat(len(case.q), 1, 1)
        value_reference.decode_values(case.q, *case.index(), [w_uv], wanted)
        for fuse, size in itertools.product((False, True), (UNCUT, 5, 1)):
            out.fill_(torch.nan)
            parts = parts_on_gpu(case.length.tolist(), 10, size)
            decode_values(case.q, *case.index(parts=parts), [w_uv], out, fuse=fuse)
            checks.see(f"decode_values {fuse} {size}", dtype, ((out, wanted),))


def check_products(checks: Checks, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Checks products of few rows, with weights stored by rows and by columns."""
    for dtype, rows in itertools.product(dtypes, (1, 16, 32, 33)):
        for depth, columns in ((2048, 1344), (768, 2560), (2560, 2048)):
            x, w = normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype, scale=depth**-0.5)
            want = x.double() @ w.double().t()
            for weights in (w, w.t().contiguous().t()):
                out = torch.full((rows, columns), torch.nan, dtype=dtype, device="cuda")
                linear(x, weights, out, columns=16)
                checks.see(f"linear {rows} {depth}", dtype, ((out, want),))
        x, w = normal(rows, 2048, dtype=dtype), normal(2, 768, 2048, dtype=dtype, scale=2048**-0.5)
        checks.see(f"gated {rows}", dtype, ((gated(x, w, columns=8), few_reference.gated(x, w)),))


def time_us(launches: Sequence[Callable[[], None]], replays: int = 20) -> float:
    """The median microseconds of one launch; all are in one CUDA graph."""
    for launch in launches[:2]:
        launch()
    graph = captured(launches)
    for _ in range(3):
        graph.replay()
    return median_us(graph, replays) / len(launches)
