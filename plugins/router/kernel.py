"""Triton: the choice of each token's experts (DeepSeek-V2, arXiv 2405.04434, 2.1.2; V3, arXiv 2412.19437, 2.1.2).

T tokens, D hidden, E experts, k chosen. Few tokens: one launch in which many programs make partial logits over slices
of D, and a second one that adds them and chooses. Many: one launch does both. Experts are held as [GROUPS, SIZE]
columns, both padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.grouped_experts.device import limits
from splash_plugins.overlap_kernel import overlap, wait_for_inputs
from splash_trt.models.config import Experts, GroupScore, Scoring

SPLIT_TOKENS = 1024
"""Up to so many tokens, the logits are made by two programs a multiprocessor or more, each over a slice of D."""
MANY_TOKENS = 4096
"""From so many on, programs take 64 rows instead of 16: each reads the whole router from the L2."""
CHOOSE_ROWS = 4
BLOCK_K = 128
EARLY_BYTES = 32768
"""Of a slice of the router that a program loads, into registers, before its inputs are there."""


@triton.jit
def _key(value, place):
    """An int64 that orders as the float32 values do, and equal ones by place, lowest first; NaN comes first."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _never():
    """A key below those of all values."""
    return -0x7FFFFFFFFFFFFFFF


@triton.jit
def _group_scores(ranking, valid, TOP2: tl.constexpr):
    """[rows, GROUPS] from ranking [rows, GROUPS, SIZE]."""
    value = tl.where(valid, ranking, float("-inf"))
    best = tl.max(value, 2)
    if TOP2:
        place = tl.arange(0, ranking.shape[2])[None, None, :]
        first = tl.min(tl.where(value == best[:, :, None], place, ranking.shape[2]), 2)
        best += tl.max(tl.where(place == first[:, :, None], float("-inf"), value), 2)
    return best


@triton.jit
def _keep_groups(ranking, valid, num_groups, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """ranking [rows, GROUPS, SIZE] with -inf outside the best groups."""
    groups: tl.constexpr = ranking.shape[1]
    group = tl.arange(0, groups)[None, :]
    key = _key(_group_scores(ranking, valid, TOP2), group)
    key = tl.where(group < num_groups, key, _never())
    kept = tl.zeros(key.shape, tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        hit = key == tl.max(key, 1)[:, None]
        kept = tl.where(hit, 1, kept)
        key = tl.where(hit, _never(), key)
    return tl.where(kept[:, :, None] != 0, ranking, float("-inf"))


@triton.jit
def _biases(bias, num_groups, group_size, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """[GROUPS * SIZE]; bias None: zeros."""
    column = tl.arange(0, GROUPS * SIZE)
    valid = (column // SIZE < num_groups) & (column % SIZE < group_size)
    biases = tl.zeros((GROUPS * SIZE,), tl.float32)
    if bias is not None:
        biases = tl.load(bias + (column // SIZE) * group_size + column % SIZE, mask=valid, other=0.0)
    return biases


@triton.jit
def _choose(
    logits, biases, row, num_rows, real, choice, weight, scale, num_groups, group_size,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Writes the choices of rows [M] (padding ones from `real` on) from their logits [M, GROUPS * SIZE].

    biases: as `_biases` loads them.
    """
    rows: tl.constexpr = logits.shape[0]
    column = tl.arange(0, GROUPS * SIZE)
    valid = (column // SIZE < num_groups) & (column % SIZE < group_size)
    expert = (column // SIZE) * group_size + column % SIZE
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(valid[None, :], logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    ranking = scores + biases[None, :]
    if GROUPS > 1:
        grouped = tl.reshape(ranking, (rows, GROUPS, SIZE))
        inside = tl.reshape(valid, (1, GROUPS, SIZE))
        ranking = tl.reshape(_keep_groups(grouped, inside, num_groups, TOP_GROUPS, TOP2), (rows, GROUPS * SIZE))
    key = tl.where(valid[None, :], _key(ranking, expert[None, :]), _never())
    place = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros((rows, CHOICES), tl.int32)
    value = tl.zeros((rows, CHOICES), tl.float32)
    for j in tl.static_range(TOP_K):
        hit = key == tl.max(key, 1)[:, None]
        best = tl.sum(tl.where(hit, expert[None, :], 0), 1)
        score = tl.sum(tl.where(hit, scores, 0.0), 1)
        chosen = tl.where(place == j, best[:, None], chosen)
        value = tl.where(place == j, score[:, None], value)
        key = tl.where(hit, _never(), key)
    if NORMALIZE:
        value = value / (tl.sum(value, 1)[:, None] + 1e-20)
    is_real = (row < real)[:, None]
    target = row[:, None] * TOP_K + place
    mask = (row < num_rows)[:, None] & (place < TOP_K)
    tl.store(choice + target, tl.where(is_real, chosen, -1), mask=mask)
    tl.store(weight + target, tl.where(is_real, value * scale, 0.0), mask=mask)


@triton.jit
def _row_block(x, x_stride, row, real, begin, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """[M, BLOCK_K]"""
    k = begin + tl.arange(0, BLOCK_K)
    source = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    return tl.load(source, mask=(row < real)[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit
def _router_block(
    router, begin, num_groups, group_size, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, GROUPS * SIZE]"""
    column = tl.arange(0, GROUPS * SIZE)
    valid = (column // SIZE < num_groups) & (column % SIZE < group_size)
    expert = (column // SIZE) * group_size + column % SIZE
    k = begin + tl.arange(0, BLOCK_K)
    inside = valid[None, :] & (k < WIDTH)[:, None]
    return tl.load(router + expert[None, :] * WIDTH + k[:, None], mask=inside, other=0.0)


@triton.jit
def _logits(
    x, x_stride, router, row, real, begin, num_groups, group_size, WIDTH: tl.constexpr, SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[M, GROUPS * SIZE] float32: x [rows, begin … begin + SLICE - 1] times the router's columns."""
    acc = tl.zeros((row.shape[0], GROUPS * SIZE), tl.float32)
    for first in range(0, SLICE, BLOCK_K):
        a = _row_block(x, x_stride, row, real, begin + first, WIDTH, BLOCK_K)
        b = _router_block(router, begin + first, num_groups, group_size, WIDTH, BLOCK_K, GROUPS, SIZE)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    x, x_stride, router, bias, num_tokens, choice, weight, num_rows, scale, num_groups, group_size,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, CHOICES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(tl.load(num_tokens), num_rows)
    biases = _biases(bias, num_groups, group_size, GROUPS, SIZE)
    wait_for_inputs(OVERLAP)
    logits = tl.zeros((ROWS, GROUPS * SIZE), tl.float32)
    if tl.program_id(0) * ROWS < real:
        logits = _logits(
            x, x_stride, router, row, real, 0, num_groups, group_size, WIDTH, WIDTH, BLOCK_K, GROUPS, SIZE, PRECISION
        )
    _choose(
        logits, biases, row, num_rows, real, choice, weight, scale, num_groups, group_size,
        GROUPS, SIZE, TOP_K, TOP_GROUPS, TOP2, SIGMOID, NORMALIZE, CHOICES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def partial_kernel(
    x, x_stride, router, num_tokens, partial, num_rows, num_groups, group_size, WIDTH: tl.constexpr,
    SLICE: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """partial [slices, T, GROUPS * SIZE]: logits over slice program_id(1) of D.

    EARLY: the router's slice is loaded, all of it, before the rows are there.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(tl.load(num_tokens), num_rows)
    begin = tl.program_id(1) * SLICE
    chunks = ()
    if EARLY:
        for c in tl.static_range(SLICE // BLOCK_K):
            first = begin + c * BLOCK_K
            chunk = _router_block(router, first, num_groups, group_size, WIDTH, BLOCK_K, GROUPS, SIZE)
            chunks = chunks + (chunk,)  # type: ignore[assignment]
    wait_for_inputs(OVERLAP)
    if tl.program_id(0) * ROWS >= real:
        return
    if EARLY:
        logits = tl.zeros((ROWS, GROUPS * SIZE), tl.float32)
        for c in tl.static_range(SLICE // BLOCK_K):
            a = _row_block(x, x_stride, row, real, begin + c * BLOCK_K, WIDTH, BLOCK_K)
            logits = tl.dot(a, chunks[c], logits, input_precision=PRECISION)
    else:
        logits = _logits(
            x, x_stride, router, row, real, begin, num_groups, group_size, WIDTH, SLICE, BLOCK_K, GROUPS, SIZE,
            PRECISION,
        )  # fmt: skip
    column = tl.arange(0, GROUPS * SIZE)
    target = (tl.program_id(1) * num_rows + row).to(tl.int64)[:, None] * (GROUPS * SIZE) + column[None, :]
    tl.store(partial + target, logits, mask=(row < real)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    partial, bias, num_tokens, choice, weight, num_rows, scale, num_groups, group_size, SLICES: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, CHOICES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds the slices in their order and chooses."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(tl.load(num_tokens), num_rows)
    biases = _biases(bias, num_groups, group_size, GROUPS, SIZE)
    wait_for_inputs(OVERLAP)
    column = tl.arange(0, GROUPS * SIZE)
    logits = tl.zeros((ROWS, GROUPS * SIZE), tl.float32)
    for s in tl.static_range(SLICES):
        source = (s * num_rows + row).to(tl.int64)[:, None] * (GROUPS * SIZE) + column[None, :]
        logits += tl.load(partial + source, mask=(row < real)[:, None], other=0.0)
    _choose(
        logits, biases, row, num_rows, real, choice, weight, scale, num_groups, group_size,
        GROUPS, SIZE, TOP_K, TOP_GROUPS, TOP2, SIGMOID, NORMALIZE, CHOICES,
    )  # fmt: skip


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    slices: int | None = None,
) -> None:
    """As plugins/router/reference.py; x's rows and all else are contiguous. slices: of D, 1: a single launch."""
    num_rows, width = x.shape
    if num_rows == 0:
        return
    assert router.is_contiguous() and choice.is_contiguous() and weight.is_contiguous()
    groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    held = _columns(groups, size)
    rules = _rules(experts)
    columns = held["GROUPS"] * held["SIZE"]
    product = tile(num_rows, columns, width, x.element_size(), limits(x.device).shared_bytes)
    block, blocks = product["BLOCK_K"], triton.cdiv(num_rows, product["ROWS"])
    slices = choose_slices(num_rows, width) if slices is None else slices
    slice_width = triton.cdiv(triton.cdiv(width, slices), block) * block
    slices = triton.cdiv(width, slice_width)
    precision = "ieee" if x.dtype is torch.float32 else "tf32"
    overlapped = overlap(x)
    if slices == 1:
        route_kernel[(blocks,)](
            x, x.stride(0), router, bias, num_tokens, choice, weight, num_rows, experts.scale, groups, size,
            WIDTH=width, PRECISION=precision, **held, **rules, **product, **overlapped,
        )  # fmt: skip
        return
    partial = torch.empty((slices, num_rows, columns), dtype=torch.float32, device=x.device)
    partial_kernel[(blocks, slices)](
        x, x.stride(0), router, num_tokens, partial, num_rows, groups, size,
        WIDTH=width, SLICE=slice_width, EARLY=slice_width * columns * router.element_size() <= EARLY_BYTES,
        PRECISION=precision, **held, **product, **overlapped,
    )  # fmt: skip
    _choose_from(partial, bias, experts, num_tokens, choice, weight)


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """As plugins/router/reference.py, where groups and a group's experts are powers of two, 16 experts or more."""
    assert logits.is_contiguous() and logits.dtype is torch.float32
    held = _columns(experts.num_groups, experts.num_experts // experts.num_groups)
    assert held["GROUPS"] * held["SIZE"] == logits.shape[1] == experts.num_experts, (held, logits.shape)
    if len(logits):
        _choose_from(logits[None], bias, experts, num_tokens, choice, weight)


def _choose_from(
    partial: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """partial [slices, T, columns]: to be added, with experts as _columns places them."""
    slices, num_rows, columns = partial.shape
    groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    choose_kernel[(triton.cdiv(num_rows, CHOOSE_ROWS),)](
        partial, bias, num_tokens, choice, weight, num_rows, experts.scale, groups, size,
        SLICES=slices, ROWS=CHOOSE_ROWS, **_columns(groups, size), **_rules(experts),
        num_warps=max(1, min(4, CHOOSE_ROWS * columns // 128)), **overlap(partial),
    )  # fmt: skip


def tile(num_rows: int, columns: int, width: int, itemsize: int, shared_bytes: int) -> dict[str, int]:
    """Block sizes and options of the products, within a block's shared memory."""
    rows = 64 if num_rows >= MANY_TOKENS and itemsize == 2 else 16
    block = min(BLOCK_K, max(16, triton.next_power_of_2(width)))
    if columns > 128 or itemsize == 4:
        block = max(16, block // 2)
    stages = max(1, min(4, (shared_bytes - 2048) // ((rows + columns) * block * itemsize)))
    return {"ROWS": rows, "BLOCK_K": block, "num_warps": 8 if rows == 64 else 4, "num_stages": stages}


def _columns(groups: int, size: int) -> dict[str, int]:
    """Experts as [GROUPS, SIZE], powers of two, at least the 16 columns that a product needs."""
    held = {"GROUPS": triton.next_power_of_2(groups), "SIZE": triton.next_power_of_2(size)}
    held["SIZE"] = max(held["SIZE"], 16 // held["GROUPS"])
    return held


def _rules(experts: Experts) -> dict[str, object]:
    return {
        "TOP_K": experts.top_k,
        "TOP_GROUPS": experts.top_groups,
        "TOP2": experts.group_score is GroupScore.TOP2_SUM,
        "SIGMOID": experts.scoring is Scoring.SIGMOID,
        "NORMALIZE": experts.normalize,
        "CHOICES": triton.next_power_of_2(experts.top_k),
    }


def choose_slices(num_rows: int, width: int) -> int:
    """Slices of D that keep about 128 programs busy while there are few rows."""
    if num_rows > SPLIT_TOKENS:
        return 1
    return max(1, min(width // (2 * BLOCK_K), 128 // triton.cdiv(num_rows, 16)))
