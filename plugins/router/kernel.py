"""Triton: the router, which chooses each token's experts (DeepSeek-V2, arXiv 2405.04434, 2.1.2; V3, arXiv 2412.19437,
2.1.2).

T tokens, D hidden, E experts, k chosen. Mostly there are two launches: in the first, many programs compute partial
logits over slices of D; the second adds them up and chooses. For many tokens one launch does both (tiles.py). Experts
are columns [GROUPS, SIZE], both padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash_plugins.grouped_experts.device import limits
from splash_plugins.overlap_kernel import overlap, wait_for_inputs
from splash_plugins.router.tiles import Tiles, choose_tiles, rows_to_choose
from splash_trt.models.config import Experts, GroupScore, Scoring


@triton.jit
def _key(value):
    """Integers that sort like the float32 values, with NaN above all: a warp finds the largest integer in one
    instruction.

    -0 would sort below 0, but no sum of a score and a bias, nor of two such sums, is -0.
    """
    return tl.where(value == value, _flipped(value.to(tl.int32, bitcast=True)), 0x7FFFFFFF)


@triton.jit
def _flipped(bits):
    """A float's bits to its key, and a key back to bits (NaN's too)."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _never():
    """A key below those of all values: never chosen."""
    return -0x7FFFFFFF - 1


@triton.jit
def _nothing():
    """The key of minus infinity."""
    return -0x7F800001


@triton.jit
def _group_keys(key, valid, TOP2: tl.constexpr):
    """The groups' scores, as keys [rows, GROUPS], from the experts' keys [rows, GROUPS, SIZE]: a group's best expert,
    or with TOP2 the sum of its best two."""
    key = tl.where(valid, key, _nothing())
    best = tl.max(key, 2)
    if TOP2:
        place = tl.arange(0, key.shape[2])[None, None, :]
        first = tl.min(tl.where(key == best[:, :, None], place, key.shape[2]), 2)
        second = tl.max(tl.where(place == first[:, :, None], _nothing(), key), 2)
        best = _key(_flipped(best).to(tl.float32, bitcast=True) + _flipped(second).to(tl.float32, bitcast=True))
    return best


@triton.jit
def _keep_groups(key, valid, num_groups, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """key [rows, GROUPS, SIZE], replaced by that of -inf outside the TOP_GROUPS best groups; of equal ones the first
    count as better."""
    groups: tl.constexpr = key.shape[1]
    group = tl.arange(0, groups)
    score = tl.where(group[None, :] < num_groups, _group_keys(key, valid, TOP2), _never())
    mine, other = score[:, :, None], score[:, None, :]
    before = (other > mine) | ((other == mine) & (group[None, :] < group[:, None])[None, :, :])
    kept = tl.sum(before.to(tl.int32), 2) < TOP_GROUPS
    return tl.where(kept[:, :, None], key, _nothing())


@triton.jit
def _biases(bias, num_groups, group_size, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The experts' biases [GROUPS * SIZE]; zeros if bias is None."""
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
    """Writes the choices and weights of rows [M] from their logits [M, GROUPS * SIZE]; rows from `real` on are padding.

    biases: as `_biases` loads them.
    """
    rows: tl.constexpr = logits.shape[0]
    column = tl.arange(0, GROUPS * SIZE)
    valid = (column // SIZE < num_groups) & (column % SIZE < group_size)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(valid[None, :], logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    key = _key(scores + biases[None, :])
    if GROUPS > 1:
        grouped = tl.reshape(key, (rows, GROUPS, SIZE))
        inside = tl.reshape(valid, (1, GROUPS, SIZE))
        key = tl.reshape(_keep_groups(grouped, inside, num_groups, TOP_GROUPS, TOP2), (rows, GROUPS * SIZE))
    key = tl.where(valid[None, :], key, _never())
    bits = scores.to(tl.int32, bitcast=True)
    place = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros((rows, CHOICES), tl.int32)
    value = tl.zeros((rows, CHOICES), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        first = tl.min(tl.where(key == best[:, None], column[None, :], GROUPS * SIZE), 1)
        hit = column[None, :] == first[:, None]
        score = tl.max(tl.where(hit, bits, _never()), 1)
        chosen = tl.where(place == j, first[:, None], chosen)
        value = tl.where(place == j, score[:, None], value)
        key = tl.where(hit, _never(), key)
    chosen = (chosen // SIZE) * group_size + chosen % SIZE
    value = value.to(tl.float32, bitcast=True)
    if NORMALIZE:
        value = value / (tl.sum(value, 1)[:, None] + 1e-20)
    is_real = (row < real)[:, None]
    target = row[:, None] * TOP_K + place
    mask = (row < num_rows)[:, None] & (place < TOP_K)
    tl.store(choice + target, tl.where(is_real, chosen, -1), mask=mask)
    tl.store(weight + target, tl.where(is_real, value * scale, 0.0), mask=mask)


@triton.jit
def _row_block(x, x_stride, row, real, begin, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block [M, BLOCK_K] of x, depth `begin` and on; zeros for padding rows."""
    k = begin + tl.arange(0, BLOCK_K)
    source = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    return tl.load(source, mask=(row < real)[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit
def _router_block(
    router, begin, first, num_groups, group_size, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """A block [BLOCK_K, COLUMNS] of the router's weights: depth `begin` and on, columns first … first + COLUMNS - 1."""
    column = first + tl.arange(0, COLUMNS)
    valid = (column // SIZE < num_groups) & (column % SIZE < group_size)
    expert = (column // SIZE) * group_size + column % SIZE
    k = begin + tl.arange(0, BLOCK_K)
    inside = valid[None, :] & (k < WIDTH)[:, None]
    return tl.load(router + expert[None, :] * WIDTH + k[:, None], mask=inside, other=0.0)


@triton.jit
def _logits(
    x, x_stride, router, row, real, begin, column, num_groups, group_size, WIDTH: tl.constexpr, SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits [M, COLUMNS] float32 over a slice of D: x [rows, begin … begin + SLICE - 1] times the router's columns
    from `column` on."""
    acc = tl.zeros((row.shape[0], COLUMNS), tl.float32)
    for first in range(0, SLICE, BLOCK_K):
        a = _row_block(x, x_stride, row, real, begin + first, WIDTH, BLOCK_K)
        b = _router_block(router, begin + first, column, num_groups, group_size, WIDTH, BLOCK_K, COLUMNS, SIZE)
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
            x, x_stride, router, row, real, 0, 0, num_groups, group_size, WIDTH, WIDTH, BLOCK_K, GROUPS * SIZE, SIZE,
            PRECISION,
        )  # fmt: skip
    _choose(
        logits, biases, row, num_rows, real, choice, weight, scale, num_groups, group_size,
        GROUPS, SIZE, TOP_K, TOP_GROUPS, TOP2, SIGMOID, NORMALIZE, CHOICES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def partial_kernel(
    x, x_stride, router, num_tokens, partial, num_rows, num_groups, group_size, WIDTH: tl.constexpr,
    SLICE: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Writes partial [slices, T, GROUPS * SIZE]: a program's COLUMNS logits over slice program_id(1) of D.

    EARLY: all that the program needs of the router's weights is loaded before x is there.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(tl.load(num_tokens), num_rows)
    begin = tl.program_id(1) * SLICE
    column = tl.program_id(2) * COLUMNS
    chunks = ()
    if EARLY:
        for c in tl.static_range(SLICE // BLOCK_K):
            first = begin + c * BLOCK_K
            chunk = _router_block(router, first, column, num_groups, group_size, WIDTH, BLOCK_K, COLUMNS, SIZE)
            chunks = chunks + (chunk,)  # type: ignore[assignment]
    wait_for_inputs(OVERLAP)
    if tl.program_id(0) * ROWS >= real:
        return
    if EARLY:
        logits = tl.zeros((ROWS, COLUMNS), tl.float32)
        for c in tl.static_range(SLICE // BLOCK_K):
            a = _row_block(x, x_stride, row, real, begin + c * BLOCK_K, WIDTH, BLOCK_K)
            logits = tl.dot(a, chunks[c], logits, input_precision=PRECISION)
    else:
        logits = _logits(
            x, x_stride, router, row, real, begin, column, num_groups, group_size, WIDTH, SLICE, BLOCK_K, COLUMNS,
            SIZE, PRECISION,
        )  # fmt: skip
    source = (tl.program_id(1) * num_rows + row).to(tl.int64) * (GROUPS * SIZE) + column
    target = source[:, None] + tl.arange(0, COLUMNS)[None, :]
    tl.store(partial + target, logits, mask=(row < real)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    partial, bias, num_tokens, choice, weight, num_rows, scale, num_groups, group_size, SLICES: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    CHOICES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up the slices of `partial` in their order and chooses."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(tl.load(num_tokens), num_rows)
    biases = _biases(bias, num_groups, group_size, GROUPS, SIZE)
    wait_for_inputs(OVERLAP)
    # A row's values are spread over all threads of a warp, so that their maximum is one instruction.
    column = tl.max_contiguous(tl.arange(0, GROUPS * SIZE), VECTOR)
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
    tiles: Tiles | None = None,
) -> None:
    """As plugins/router/reference.py; the rows of x and all other tensors are contiguous. tiles: in place of those that
    tiles.py chooses."""
    num_rows, width = x.shape
    if num_rows == 0:
        return
    assert router.is_contiguous() and choice.is_contiguous() and weight.is_contiguous()
    groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    held = _columns(groups, size)
    columns = held["GROUPS"] * held["SIZE"]
    if tiles is None:
        shared_bytes = limits(x.device).shared_bytes
        tiles = choose_tiles(num_rows, held["GROUPS"], columns, width, x.element_size(), shared_bytes)
    blocks = triton.cdiv(num_rows, tiles.rows)
    product = {"ROWS": tiles.rows, "BLOCK_K": tiles.block_k, "num_warps": tiles.warps, "num_stages": tiles.stages}
    precision = "ieee" if x.dtype is torch.float32 else "tf32"
    if tiles.fused:
        route_kernel[(blocks,)](
            x, x.stride(0), router, bias, num_tokens, choice, weight, num_rows, experts.scale, groups, size,
            WIDTH=width, PRECISION=precision, **held, **_rules(experts), **product, **overlap(x),
        )  # fmt: skip
        return
    slice_width, slices = tiles.slice_width(width), triton.cdiv(width, tiles.slice_width(width))
    partial = torch.empty((slices, num_rows, columns), dtype=torch.float32, device=x.device)
    partial_kernel[(blocks, slices, columns // tiles.columns)](
        x, x.stride(0), router, num_tokens, partial, num_rows, groups, size,
        WIDTH=width, SLICE=slice_width, EARLY=tiles.early(width, router.element_size()), COLUMNS=tiles.columns,
        PRECISION=precision, **held, **product, **overlap(x),
    )  # fmt: skip
    _choose_from(partial, bias, experts, num_tokens, choice, weight, tiles.choose_rows)


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """As plugins/router/reference.py, if the numbers of groups and of experts in a group are powers of two and there
    are 16 experts or more."""
    assert logits.is_contiguous() and logits.dtype is torch.float32
    held = _columns(experts.num_groups, experts.num_experts // experts.num_groups)
    assert held["GROUPS"] * held["SIZE"] == logits.shape[1] == experts.num_experts, (held, logits.shape)
    if len(logits):
        _choose_from(logits[None], bias, experts, num_tokens, choice, weight, rows_to_choose(2, held["GROUPS"]))


def _choose_from(
    partial: torch.Tensor,
    bias: torch.Tensor | None,
    experts: Experts,
    num_tokens: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    rows: int,
) -> None:
    """Adds partial [slices, T, columns] up and chooses; columns are as _columns pads them. rows: tokens of a program,
    which is one warp."""
    slices, num_rows, columns = partial.shape
    groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    choose_kernel[(triton.cdiv(num_rows, rows),)](
        partial, bias, num_tokens, choice, weight, num_rows, experts.scale, groups, size,
        SLICES=slices, VECTOR=max(1, min(4, columns // 32)), ROWS=rows, **_columns(groups, size), **_rules(experts),
        num_warps=1, **overlap(partial),
    )  # fmt: skip


def _columns(groups: int, size: int) -> dict[str, int]:
    """Pads experts to [GROUPS, SIZE], powers of two, with at least the 16 columns that a product needs."""
    held = {"GROUPS": triton.next_power_of_2(groups), "SIZE": triton.next_power_of_2(size)}
    held["SIZE"] = max(held["SIZE"], 16 // held["GROUPS"])
    return held


def _rules(experts: Experts) -> dict[str, object]:
    """The model's rules of choosing, as the kernels' constants."""
    return {
        "TOP_K": experts.top_k,
        "TOP_GROUPS": experts.top_groups,
        "TOP2": experts.group_score is GroupScore.TOP2_SUM,
        "SIGMOID": experts.scoring is Scoring.SIGMOID,
        "NORMALIZE": experts.normalize,
        "CHOICES": triton.next_power_of_2(experts.top_k),
    }
