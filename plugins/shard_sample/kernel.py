"""Triton: chooses the next token of greedy rows, and of rows that are sampled without filters, over shards of the
vocabulary, as reference.py.

W rows, V ids of this rank, B blocks of ids, N ranks.

Scores of sampled rows are defined in float64, with two logarithms and a division for each id. That costs many times
what reading the logits does, and consumer GPUs have next to no float64. So a first kernel, over (row, block), estimates
scores in float32 from the exact integers of the noise and keeps each block's best estimate. A second one, over rows,
computes exact scores only in blocks whose best estimate is within the error bound of the row's best: usually in one.
Greedy rows are exact from the start and skip the noise.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from splash_plugins.overlap_kernel import overlap, wait_for_inputs

BLOCK = 1024
"""Ids in a block."""

WINNERS_BLOCK = 256  # rows of a program that compares the ranks' best scores

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_B = tl.constexpr(0x94D049BB133111EB)
_MIN_TEMPERATURE = tl.constexpr(1e-30)
_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)

# |estimate - score * temperature| < temperature * _NOISE_ERROR + |score * temperature| * _LOGIT_ERROR for every id that
# can be the best, with a factor of ten to spare: noise() below is right to 1e-4, and float32 rounds to 2**-24.
_NOISE_ERROR = tl.constexpr(1e-3)
_LOGIT_ERROR = tl.constexpr(2.0**-20)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * _MULTIPLIER_A
    x = (x ^ (x >> 27)) * _MULTIPLIER_B
    return x ^ (x >> 31)


@triton.jit
def _hashes(seed, position, first_id, columns):
    """The integers of runtime/noise.py for the row with this seed and position, for ids first_id + columns."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) + _GAMMA)
    key = _mix64(key + (position + 1).to(tl.uint64, bitcast=True) * _GAMMA)
    key += (first_id.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * _GAMMA
    return _mix64(key + columns.to(tl.uint32, bitcast=True).to(tl.uint64) * _GAMMA)


@triton.jit
def _log(x):
    """The natural logarithm of normal numbers above 0, right to 1.2e-5 or rounding; a third of the exact one's work.

    The polynomial interpolates log at the Chebyshev nodes of [1, 2].
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    p = 1.1017396 + m * (-0.27900102 + m * 0.029808765)
    return exponent * 0.6931472 + (-1.9324432 + m * (3.4989067 + m * (-2.4189995 + m * p)))


@triton.jit
def noise(hashes):
    """Estimates the Gumbel noise -log(-log(u)) in float32.

    u is the reference's uniform number. The smaller of u and 1 - u, w, is computed from the integers, since float32 is
    precise near 0 only. For small w, -log(1 - w) is w + w**2 / 2 + …, since the logarithm is inexact near 1.
    """
    above = hashes.to(tl.int64, bitcast=True) < 0  # u >= 0.5
    # The reference's u is the middle of a cell of width 2**-52; this takes the middle too.
    cell = (tl.where(above, hashes ^ 0xFFFFFFFFFFFFFFFF, hashes) & 0xFFFFFFFFFFFFF000) | 0x800
    high, low = (cell >> 32).to(tl.int32), (cell & 0xFFFFFFFF).to(tl.uint32)
    w = high.to(tl.float32) * 2.0**-32 + low.to(tl.float32) * 2.0**-64
    series = w * (1.0 + w * (0.5 + w * (1 / 3 + w * (0.25 + w * 0.2))))
    exponential = -_log(tl.where(above, 1.0 - w, w))
    return -_log(tl.where(above & (w < 0.15), series, exponential))


@triton.jit
def _exact_noise(hashes):
    top = (hashes >> 12).to(tl.int64, bitcast=True).to(tl.float64)
    return -tl.log(-tl.log((top + 0.5) * 2.0**-52))


@triton.jit
def _load_logits(logits, stride, row, columns, num_ids):
    """Logits in float32; those that must not be chosen (NaN, +inf, past the end) are -inf."""
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < num_ids, other=float("-inf"))
    x = x.to(tl.float32)
    return tl.where(x < float("inf"), x, float("-inf"))


@triton.jit(do_not_specialize=["first_id"])
def _best_of_blocks(
    logits, stride, temperature, seed, position, first_id, num_ids, best, column, num_blocks, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Fills best [W, B] float32: each block's largest logit for greedy rows, its largest estimate of logit +
    temperature * noise for others; and for greedy rows column [W, B] int32, the first column that has it."""
    wait_for_inputs(OVERLAP)
    block, row = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = _load_logits(logits, stride, row, columns, num_ids)
    place = row * num_blocks + block
    kelvin = tl.load(temperature + row).to(tl.float32)
    if kelvin > 0:
        hashes = _hashes(tl.load(seed + row), tl.load(position + row), first_id, columns)
        tl.store(best + place, tl.max(x + kelvin * noise(hashes), 0))
    else:
        value, where = tl.max(x, 0, return_indices=True)
        tl.store(best + place, value)
        tl.store(column + place, block * BLOCK + where)


@triton.jit(do_not_specialize=["first_id"])
def _best_of_rows(
    logits,
    stride,
    temperature,
    seed,
    position,
    first_id,
    num_ids,
    best,
    column,
    num_blocks,
    score,
    score_stride,
    id,
    id_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    bests = tl.load(best + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    peak, first_block = tl.max(bests, 0, return_indices=True)
    kelvin = tl.load(temperature + row).to(tl.float64)
    won = tl.full((), float("-inf"), tl.float64)
    at = tl.full((), 0, tl.int32)
    if kelvin > 0:
        kelvin = tl.where(kelvin > _MIN_TEMPERATURE, kelvin, tl.full((), _MIN_TEMPERATURE, tl.float64))
        scale = kelvin.to(tl.float32)
        margin = scale * _NOISE_ERROR + (tl.abs(peak) + 40.0 * scale) * _LOGIT_ERROR  # noise stays below 37
        left = (bests >= peak - 2.0 * margin) & (bests > float("-inf"))
        while tl.max(left.to(tl.int32), 0) > 0:
            block = tl.min(tl.where(left, blocks, BLOCKS), 0)
            left = left & (blocks != block)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            x = _load_logits(logits, stride, row, columns, num_ids)
            hashes = _hashes(tl.load(seed + row), tl.load(position + row), first_id, columns)
            value, where = tl.max(_exact_noise(hashes) + x.to(tl.float64) / kelvin, 0, return_indices=True)
            at = tl.where(value > won, block * BLOCK + where, at)
            won = tl.maximum(won, value)
    else:
        won = peak.to(tl.float64)
        at = tl.load(column + row * num_blocks + first_block)
    tl.store(score + row * score_stride, won)
    tl.store(id + row * id_stride, first_id.to(tl.int64) + at)


def best_of_shard(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    first_id: int,
    score: Tensor,
    id: Tensor,
) -> None:
    """As the reference, for logits of at most 32 bits. Allocates 8 bytes for each row and block, to pass results from
    the first kernel to the second."""
    num_rows, num_ids = logits.shape
    if num_rows == 0:
        return
    if num_ids == 0:
        score.fill_(float("-inf"))
        id.fill_(first_id)
        return
    assert logits.element_size() <= 4 and logits.stride(1) == 1
    assert all(x.is_contiguous() for x in (temperature, seed, position))
    num_blocks = triton.cdiv(num_ids, BLOCK)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    column = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    _best_of_blocks[num_blocks, num_rows](
        logits, logits.stride(0), temperature, seed, position, first_id, num_ids, best, column, num_blocks,
        BLOCK=BLOCK, **overlap(logits),
    )  # fmt: skip
    _best_of_rows[(num_rows,)](
        logits,
        logits.stride(0),
        temperature,
        seed,
        position,
        first_id,
        num_ids,
        best,
        column,
        num_blocks,
        score,
        score.stride(0),
        id,
        id.stride(0),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks),
        **overlap(logits),
    )


@triton.jit
def _best_of_shards(found, tokens, num_rows, N: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    won = tl.full((ROWS,), float("-inf"), tl.float64)
    token = tl.full((ROWS,), _LAST, tl.int64)
    for rank in tl.static_range(N):
        cell = found + (rank * num_rows + rows) * 2
        score = tl.load(cell, mask=rows < num_rows, other=0.0)
        ids = tl.load((cell + 1).to(tl.pointer_type(tl.int64)), mask=rows < num_rows, other=0)
        token = tl.where(score > won, ids, tl.where(score == won, tl.minimum(token, ids), token))
        won = tl.maximum(won, score)
    tl.store(tokens + rows, token, mask=rows < num_rows)


def best_of_shards(found: Tensor, tokens: Tensor) -> None:
    """As the reference; found and tokens are contiguous."""
    num_ranks, num_rows, _ = found.shape
    assert found.is_contiguous() and tokens.is_contiguous()
    if num_rows:
        grid = (triton.cdiv(num_rows, WINNERS_BLOCK),)
        _best_of_shards[grid](found, tokens, num_rows, N=num_ranks, ROWS=WINNERS_BLOCK, **overlap(found))
