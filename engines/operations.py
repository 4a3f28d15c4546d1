"""Operations that have more than one implementation, with their candidates and the shapes that each is made for.

T tokens, D hidden, E experts, Q query latent, W cache row, C context, N outputs of a product, K its inputs.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from splash_engines import ops
from splash_engines.registry import Candidate, Case, Function, Operation, one_line, relative_error
from splash_engines.trtllm import HOPPER, Gpu, Trtllm, probe
from splash_engines.trtllm_headers import Headers, LaidOut, find_headers
from splash_trt import environment

BLOCK = 128  # numbers that share an FP8 scale, in both directions
FP8_MAX = 448.0  # the largest float8_e4m3fn
DSV3_HIDDEN = 7168  # the sizes (DeepSeek-V3's) that TensorRT-LLM's small products are written for
DSV3_EXPERTS = 256
DSV3_A_OUT = 2112
FEW_TOKENS = 16
TOP_K = 2048


@dataclass(frozen=True)
class Here:
    """What this machine has for candidates. Packages are looked for when they are first asked for."""

    gpu: Gpu | None
    find_trtllm: Callable[[], Trtllm]
    """Loads the operators."""
    find_headers: Callable[[], Headers | str]

    @cached_property
    def trtllm(self) -> Trtllm:
        return self.find_trtllm()

    @cached_property
    def headers(self) -> Headers | str:
        """The headers for the FP8 block product's compilation, or the reason why there are none."""
        return self.find_headers()


def this_machine() -> Here:
    gpu = Gpu.here()
    return Here(gpu, lambda: probe(gpu), find_headers)


def operations(here: Here) -> tuple[Operation, ...]:
    return (router_product(here), fused_a(here), indexer_topk(here), fp8_quantize(here), fp8_product(here))


def random_of(case: Case, generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Random numbers of about 1; dtype None: the case's."""
    return torch.randn(shape, generator=generator, device=case.device).to(dtype or case.dtype)


def weight_of(case: Case, generator: torch.Generator, out: int, inner: int) -> torch.Tensor:
    """A random weight [out, inner], whose products with numbers of about 1 are about 1 too."""
    return (random_of(case, generator, out, inner, dtype=torch.float32) * inner**-0.5).to(case.dtype)


def torch_candidate(function: Function) -> Candidate:
    return Candidate(name="torch", load=lambda: function, trusted=True)


def wrapped(candidate: Candidate, wrap: Callable[[Function], Function]) -> Candidate:
    """The candidate with its function wrapped: wrap makes of it one with the reference's arguments and result."""

    def load() -> Function | str:
        found = candidate.load()
        return found if isinstance(found, str) else wrap(found)

    return dataclasses.replace(candidate, load=load)


def trtllm_candidate(
    here: Here, operator: str, wrap: Callable[[Function], Function], unfit: Callable[[Case], str | None]
) -> Candidate:
    """An operator of TensorRT-LLM as a candidate. wrap: as in `wrapped`."""
    name = f"trtllm.{operator}"
    return wrapped(Candidate(name=name, load=lambda: here.trtllm.operator(operator), unfit=unfit), wrap)


def triton_candidate(here: Here, module: str, function: str) -> Candidate:
    """A Triton kernel of ours as a candidate; its module is imported only if there is a GPU."""

    def unfit(case: Case) -> str | None:
        return "kernels compute in float32" if case.dtype is torch.float64 else None

    def load() -> Function | str:
        if here.gpu is None:
            return "Triton's kernels need a GPU, and this machine has none"
        try:
            return getattr(importlib.import_module(f"splash_plugins.{module}"), function)  # type: ignore[no-any-return]
        except ImportError as error:
            return f"Triton does not load: {error}"

    return Candidate(name=f"triton.{function}", load=load, unfit=unfit)


def _needs_bf16(case: Case) -> str | None:
    return None if case.dtype is torch.bfloat16 else f"it takes bfloat16, not {case.dtype}"


def router_product(here: Here) -> Operation:
    """x [T, D], router [E, D] -> logits [T, E] float32."""

    def reference(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        return F.linear(ops.wide(x), ops.wide(router))

    def unfit(case: Case) -> str | None:
        if case["hidden"] != DSV3_HIDDEN or case["experts"] != DSV3_EXPERTS or case["tokens"] > FEW_TOKENS:
            fast = f"{DSV3_EXPERTS} experts, hidden {DSV3_HIDDEN} and up to {FEW_TOKENS} tokens"
            return f"its kernel is for {fast}; it calls cuBLAS for all else"
        return _needs_bf16(case)

    def wrap(operator: Function) -> Function:
        return lambda x, router: operator(x, router.t(), None, torch.float32)

    def wide_out(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, router.t(), out_dtype=torch.float32)

    def no_wide_out(case: Case) -> str | None:
        return "torch widens results on CUDA alone" if case.device.type != "cuda" else _needs_bf16(case)

    return Operation(
        name="router_product",
        meaning="a token's scores for all experts, before they are chosen",
        reference=reference,
        inputs=lambda case, g: (
            random_of(case, g, case["tokens"], case["hidden"]),
            weight_of(case, g, case["experts"], case["hidden"]),
        ),
        disagreement=relative_error(1e-4),
        candidates=(
            torch_candidate(reference),
            Candidate(name="torch.wide_out", load=lambda: wide_out, unfit=no_wide_out),
            trtllm_candidate(here, "dsv3_router_gemm_op", wrap, unfit),
        ),
    )


def fused_a(here: Here) -> Operation:
    """x [T, D], qkv_a [Q + W, D] -> [T, Q + W]: query latents and cache rows (not normed yet) in one product."""

    def unfit(case: Case) -> str | None:
        if case["hidden"] != DSV3_HIDDEN or case["out"] != DSV3_A_OUT or case["tokens"] > FEW_TOKENS:
            fast = f"{DSV3_HIDDEN} to {DSV3_A_OUT} and up to {FEW_TOKENS} tokens"
            return f"its kernel is for {fast}; it calls cuBLAS for all else"
        return _needs_bf16(case)

    def wrap(operator: Function) -> Function:
        return lambda x, weight: operator(x, weight.t(), None, None)

    return Operation(
        name="fused_a",
        meaning="hidden state to query latent and cache row in one product",
        reference=F.linear,
        inputs=lambda case, g: (
            random_of(case, g, case["tokens"], case["hidden"]),
            weight_of(case, g, case["out"], case["hidden"]),
        ),
        disagreement=relative_error(5e-3),
        candidates=(torch_candidate(F.linear), trtllm_candidate(here, "dsv3_fused_a_gemm_op", wrap, unfit)),
    )


def indexer_topk(here: Here) -> Operation:
    """scores [T, C] float32, length [T] int32 (each token's context), k -> the best rows [T, k] int32, -1 where there
    are fewer."""

    def reference(scores: torch.Tensor, length: torch.Tensor, k: int) -> torch.Tensor:
        place = torch.arange(scores.shape[1], device=scores.device)
        masked = scores.masked_fill(place >= length[:, None], -torch.inf)
        found = masked.topk(min(k, scores.shape[1]), dim=-1).indices.to(torch.int32)
        found = found.masked_fill(found >= length[:, None], -1)
        return F.pad(found, (0, k - found.shape[1]), value=-1)

    def wrap(operator: Function) -> Function:
        def call(scores: torch.Tensor, length: torch.Tensor, k: int) -> torch.Tensor:
            found = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
            operator(scores, length, found, 1, k)
            return found

        return call

    def inputs(case: Case, generator: torch.Generator) -> tuple[Any, ...]:
        tokens, context = case["tokens"], case["context"]
        # All values differ, so that there is one right answer.
        order = torch.rand((tokens, context), generator=generator, device=case.device).argsort(dim=-1)
        length = torch.randint(1, context + 1, (tokens,), generator=generator, device=case.device, dtype=torch.int32)
        return order.to(torch.float32), length, case["k"]

    def disagreement(expected: torch.Tensor, got: torch.Tensor) -> str | None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
        different = (expected.sort(dim=-1).values != got.sort(dim=-1).values).any(dim=-1)
        return f"other rows for {int(different.sum())} of {len(got)} tokens" if bool(different.any()) else None

    return Operation(
        name="indexer_topk",
        meaning="the cache rows that sparse attention reads (decode)",
        reference=reference,
        inputs=inputs,
        disagreement=disagreement,
        candidates=(
            torch_candidate(reference),
            trtllm_candidate(
                here,
                "indexer_topk_decode",
                wrap,
                lambda case: None if case["k"] == TOP_K else f"it is made for k = {TOP_K}, not {case['k']}",
            ),
        ),
    )


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> FP8 [T, K] and a float32 scale for each 128 numbers, [T, K / 128] (DeepSeek-V3, section 3.3.2)."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-10) / FP8_MAX
    return (blocks / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> FP8 [N, K] and a float32 scale for each 128 x 128 block, [N / 128, K / 128]."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-10) / FP8_MAX
    quantised = blocks / scale[:, None, :, None]
    return quantised.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), scale


def _wide_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float().unflatten(-1, (-1, BLOCK)) * scale[..., None]).flatten(-2)


def _on_hopper(here: Here, case: Case) -> str | None:
    if here.gpu is not None and here.gpu.capability != HOPPER:
        return f"its layout of scales and its kernel are Hopper's; this is {here.gpu.name}"
    return _needs_bf16(case)


def fp8_quantize(here: Here) -> Operation:
    """x [T, K] quantised to FP8 and back to float32: implementations lay out scales differently, so this is what is
    compared."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        return _wide_rows(*quantize_rows(x))

    def wrap(operator: Function) -> Function:
        def call(x: torch.Tensor) -> torch.Tensor:
            values, scale = operator(x)
            # On Hopper, scales are stored column by column, each padded to a multiple of 4.
            columns = scale.flatten()[: x.shape[1] // BLOCK * (-(-len(x) // 4) * 4)].view(x.shape[1] // BLOCK, -1)
            return _wide_rows(values, columns[:, : len(x)].t())

        return call

    return Operation(
        name="fp8_quantize",
        meaning="activations to FP8, a scale for each 128 numbers",
        reference=reference,
        inputs=lambda case, g: (random_of(case, g, case["tokens"], case["inner"]),),
        disagreement=relative_error(1e-2),
        candidates=(
            torch_candidate(reference),
            trtllm_candidate(here, "fp8_quantize_1x128", wrap, lambda case: _on_hopper(here, case)),
        ),
    )


def fp8_product(here: Here) -> Operation:
    """x [T, K] bfloat16, weight [N, K] FP8, its scales [N / 128, K / 128] -> [T, N] bfloat16; quantises x too."""

    def reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)) * scale[:, None, :, None]
        return (_wide_rows(*quantize_rows(x)) @ blocks.flatten(2).flatten(0, 1).t()).to(x.dtype)

    def load() -> Function | str:
        product = here.trtllm.operator("fp8_block_scaling_gemm_impl")
        quantize = here.trtllm.operator("fp8_quantize_1x128")
        if isinstance(product, str):
            return product
        if isinstance(quantize, str):
            return quantize
        if here.trtllm.has_headers:
            return fp8_product_of(quantize, product, None)
        if isinstance(here.headers, str):
            return here.headers
        try:
            return fp8_product_of(quantize, product, here.headers)
        except RuntimeError as error:
            return f"it does not compile: {one_line(error)}"

    def inputs(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        weight = weight_of(case, generator, case["out"], case["inner"])
        return random_of(case, generator, case["tokens"], case["inner"]), *quantize_blocks(weight)

    def unfit(case: Case) -> str | None:
        if case["inner"] % BLOCK or case["out"] % BLOCK:
            return f"it takes multiples of {BLOCK}"
        return _on_hopper(here, case)

    return Operation(
        name="fp8_product",
        meaning="a product with an FP8 weight, a scale for each 128 x 128 block",
        reference=reference,
        inputs=inputs,
        disagreement=relative_error(2e-2),
        candidates=(
            torch_candidate(reference),
            Candidate(name="trtllm.fp8_block_scaling_gemm_impl", load=load, unfit=unfit),
        ),
    )


def fp8_product_of(quantize: Function, product: Function, headers: Headers | None) -> Function:
    """A function that calls the two operators in a row. headers: to be given to the product's compilation
    (trtllm_headers.py); None: it finds them itself. RuntimeError if it does not compile.
    """
    laid_out = LaidOut(headers) if headers is not None else None

    def call(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values, rows = quantize(x)
        return product(values, weight, rows, scale)  # type: ignore[no-any-return]

    if laid_out is not None:
        # The product looks for the headers' folder only in its first call, which is this one.
        x = torch.ones((1, BLOCK), dtype=torch.bfloat16, device="cuda")
        with environment.first_on_path(laid_out.programs):
            call(x, *quantize_blocks(x.expand(BLOCK, BLOCK)))
        call.__dict__["headers"] = laid_out  # kept, since they are read in every compilation, one for each shape
    return call
