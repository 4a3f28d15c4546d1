"""Triton: the two products of gated experts, over blocks of rows of one expert each, and the sum over a token's pairs.

T tokens, D hidden, I intermediate, k choices a token, E_r experts on this rank, P = T * k pairs (pair p is choice p % k
of token p // k). Rows of `hidden` are in the sorted order of sort_kernel.py; row p of `out` is pair p's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splash_plugins.overlap_kernel import wait_for_inputs


@triton.jit
def load_weights(
    w, origin, n, begin, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A block [BLOCK_K, BLOCK_N], transposed, of the matrix [COLUMNS, DEPTH] that begins at row `origin` (int64) of w:
    tile n of its columns, depth `begin` and on.

    Columns past the end repeat the last one; with TMA (w is a descriptor) they are whatever follows in w.
    """
    if TMA:
        b = w.load([origin.to(tl.int32) + n * BLOCK_N, begin]).T
    else:
        k = begin + tl.arange(0, BLOCK_K)
        column = n * BLOCK_N + tl.arange(0, BLOCK_N)
        if COLUMNS % BLOCK_N != 0:
            column = tl.minimum(column, COLUMNS - 1)
        pointer = w + origin * DEPTH + column[None, :] * DEPTH + k[:, None]
        if DEPTH % BLOCK_K != 0:
            b = tl.load(pointer, mask=(k < DEPTH)[:, None], other=0.0)
        else:
            b = tl.load(pointer)
    return b


@triton.jit
def load_rows(x, row, x_stride, keep, begin, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block [BLOCK_M, BLOCK_K] of the given rows (int64) of x, depth `begin` and on; 0 where not `keep`."""
    k = begin + tl.arange(0, BLOCK_K)
    mask = keep[:, None]
    if DEPTH % BLOCK_K != 0:
        mask = mask & (k < DEPTH)[None, :]
    return tl.load(x + row[:, None] * x_stride + k[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(out, row, keep, n, value, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes value to tile n of the columns of out [*, COLUMNS], in those of the given rows (int64) that are `keep`."""
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = keep[:, None]
    if COLUMNS % BLOCK_N != 0:
        mask = mask & (column < COLUMNS)[None, :]
    tl.store(out + row[:, None] * COLUMNS + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_tile(
    x, row, x_stride, keep, w, expert, n, DEPTH: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """silu(x[row] gate) * (x[row] up), [rows, columns] float32; w [E_r * 2 I, D], an expert's gate before its up."""
    origin = expert * (2 * INNER)
    gate = tl.zeros((row.shape[0], BLOCK_N), tl.float32)
    up = tl.zeros((row.shape[0], BLOCK_N), tl.float32)
    for begin in range(0, DEPTH, BLOCK_K):
        a = load_rows(x, row, x_stride, keep, begin, DEPTH, BLOCK_K)
        b = load_weights(w, origin, n, begin, INNER, DEPTH, BLOCK_N, BLOCK_K, TMA)
        c = load_weights(w, origin + INNER, n, begin, INNER, DEPTH, BLOCK_N, BLOCK_K, TMA)
        gate = tl.dot(a, b, gate, input_precision=PRECISION)
        up = tl.dot(a, c, up, input_precision=PRECISION)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def down_tile(
    hidden, row, keep, w, expert, n, INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, columns] float32: hidden[row] times the expert's part of w [E_r * D, I]."""
    acc = tl.zeros((row.shape[0], BLOCK_N), tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        a = load_rows(hidden, row, INNER, keep, begin, INNER, BLOCK_K)
        b = load_weights(w, expert * WIDTH, n, begin, WIDTH, INNER, BLOCK_N, BLOCK_K, TMA)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _place(tile, blocks, num_blocks, num_columns, group, BLOCK_M: tl.constexpr):
    """(expert int64, rows, which of them are the expert's, tile of columns) of a tile.

    `group` blocks of rows are multiplied with one tile of columns before the next one, so that both operands stay in
    the L2 cache.
    """
    first = tile // (group * num_columns) * group
    size = tl.minimum(num_blocks - first, group)
    within = tile - first * num_columns
    entry = blocks + (first + within % size) * 4
    row = tl.load(entry + 1) + tl.arange(0, BLOCK_M)
    return tl.load(entry).to(tl.int64), row, row < tl.load(entry + 2), within // size


@triton.jit(do_not_specialize=["group"])
def gate_up_kernel(
    x, x_stride, gate_up, hidden, pairs, blocks, num_blocks, group, DEPTH: tl.constexpr, INNER: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """hidden [P, I] = silu(x gate) * (x up) from x [T, D]. Programs take tiles in turn; how many tiles there are, only
    the device knows."""
    wait_for_inputs(OVERLAP)
    count = tl.load(num_blocks)
    columns: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    while tile < count * columns:
        expert, row, keep, n = _place(tile, blocks, count, columns, group, BLOCK_M)
        token = tl.load(pairs + row, mask=keep, other=0) // TOP_K
        value = gate_up_tile(
            x, token.to(tl.int64), x_stride, keep, gate_up, expert, n, DEPTH, INNER, BLOCK_N, BLOCK_K, TMA, PRECISION
        )
        store_rows(hidden, row.to(tl.int64), keep, n, value, INNER, BLOCK_N)
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["group"])
def down_kernel(
    hidden, down, out, pairs, blocks, num_blocks, group, INNER: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [P, D] from hidden [P, I]. Programs take tiles as in gate_up_kernel."""
    wait_for_inputs(OVERLAP)
    count = tl.load(num_blocks)
    columns: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    while tile < count * columns:
        expert, row, keep, n = _place(tile, blocks, count, columns, group, BLOCK_M)
        pair = tl.load(pairs + row, mask=keep, other=0).to(tl.int64)
        value = down_tile(
            hidden, row.to(tl.int64), keep, down, expert, n, INNER, WIDTH, BLOCK_N, BLOCK_K, TMA, PRECISION
        )
        store_rows(out, pair, keep, n, value, WIDTH, BLOCK_N)
        tile += tl.num_programs(0)


@triton.jit
def sum_pairs(
    y, row, choice, weight, addend, addend_stride, first_expert, num_experts, token, column, inside, width,
    TOP_K: tl.constexpr,
):  # fmt: skip
    """[columns] float32: addend[token] + sum of weight * y[pair] over the token's experts on this rank, in the order of
    choices; 0 where not `inside`.

    row [P]: the row of y that each pair has; None: pair p has row p. choice None: the sum of all TOP_K rows of y,
    without weights.
    """
    acc = tl.zeros((column.shape[0],), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        if choice is None:
            acc += tl.load(y + pair * width + column, mask=inside, other=0.0).to(tl.float32)
        else:
            local = tl.load(choice + pair) - first_expert
            here = (local >= 0) & (local < num_experts)
            source = pair
            if row is not None:
                source = tl.load(row + pair, mask=here, other=0).to(tl.int64)
            # Rows for other ranks' pairs were never written and may hold anything.
            value = tl.load(y + source * width + column, mask=inside & here, other=0.0).to(tl.float32)
            acc += value * tl.load(weight + pair)
    if addend is not None:
        acc += tl.load(addend + token * addend_stride + column, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def combine_kernel(
    y, row, choice, weight, addend, addend_stride, out, out_stride, first_expert, num_experts,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [T, D]: sum_pairs of every token, rounded."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = sum_pairs(
        y, row, choice, weight, addend, addend_stride, first_expert, num_experts, token, column, inside, WIDTH, TOP_K
    )
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)
