"""The products of gated experts for Hopper, in Gluon: as product_kernel, with specialised warps.

A program (a block of threads) takes one tile of 128 rows and 256 columns after another. A producer warp (four warps
for gate_up) copies both operands into shared memory, some stages ahead, and two consumer warpgroups, each with 64 of
the rows, multiply. Consumers synchronise with the producer, through barriers in shared memory, but not with each other:
one may be ahead of the other by all stages, and so writes its results while the other keeps the tensor cores busy. A
warpgroup whose half of a tile has no rows only frees the stages.

Names as in product_kernel.py. Weights are copied by the tensor memory accelerator (TMA), and so are activations (rows
of down's product), which lie in sorted order; tokens' rows (of gate_up's) are gathered, 16 bytes at a time.
"""

# Kernels' arguments are pointers, numbers and blocks that have no Python type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splash_plugins.grouped_experts.device import limits
from splash_plugins.grouped_experts.sort_kernel import SortedPairs, max_blocks

MIN_ROWS = 128
"""From this many pairs per expert (T * k / E_r, as in tiles.py) on, this kernel is faster than the portable ones."""
# Sizes as measured on an H200.
ROWS = 128  # rows of a tile, and so the block_m to call sort_pairs with
COLUMNS = 256  # columns of a tile; gate_up's are gate and up of 128 activations
DEPTH = 64  # depth that is copied together: 128 bytes, the widest swizzle
STAGES = 4
GROUP = 8  # blocks of rows that are multiplied with one tile of columns before the next one, for the L2 cache
_HALF = gl.constexpr(ROWS // 2)  # rows of a warpgroup
_PANEL = gl.constexpr(COLUMNS // 2)  # columns that are copied together
_STEP = gl.constexpr(DEPTH)
_STAGES = gl.constexpr(STAGES)
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name until Triton 3.6, and since


@gluon.jit
def _place(tile, blocks, count, group, TILES: gl.constexpr):
    """(expert, first row, end row, tile of columns) of a tile, as product_kernel._place; of the last tile for those
    past it."""
    tile = min(tile, count * TILES - 1)
    first = tile // (group * TILES) * group
    size = min(count - first, group)
    within = tile - first * TILES
    entry = blocks + (first + within % size) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), within // size


@gluon.jit
def _tokens(pairs, first, end, TOP_K: gl.constexpr):
    """The token of each row of a tile, [2 * _HALF]; rows past the end repeat the last one."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    row = gl.minimum(first + gl.arange(0, 2 * _HALF, layout=layout), end - 1)
    return gl.load(pairs + row) // TOP_K


@gluon.jit
def _copy(
    x, x_stride, w, token, first, column, step, a_buffer, b_buffer, full, empty,
    BEGIN: gl.constexpr, END: gl.constexpr, SECOND: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Copies depth [BEGIN, END) of a tile's operands. `step` counts the stages filled so far; returns it advanced."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if GATED:
        numbers = gl.arange(0, _STEP, layout=gl.SliceLayout(0, layout))
        source = x + token.to(gl.int64)[:, None] * x_stride + numbers[None, :]
        rows = a_buffer._reinterpret(a_buffer.dtype, [_STAGES, 2 * _HALF, _STEP], a_buffer.layout)
    for begin in range(BEGIN, END, _STEP):
        stage = step % _STAGES
        mbarrier.wait(empty.index(stage), step // _STAGES & 1 ^ 1)
        ready = full.index(stage)
        if GATED:
            mbarrier.expect(ready, 2 * w.block_type.nbytes)
        else:
            mbarrier.expect(ready, 2 * w.block_type.nbytes + 2 * x.block_type.nbytes)
        tma.async_copy_global_to_shared(w, [column, begin], ready, b_buffer.index(2 * stage))
        tma.async_copy_global_to_shared(w, [column + SECOND, begin], ready, b_buffer.index(2 * stage + 1))
        if GATED:
            async_copy.async_copy_global_to_shared(rows.index(stage), source + begin)
            async_copy.mbarrier_arrive(ready, increment_count=False)
        else:
            tma.async_copy_global_to_shared(x, [first, begin], ready, a_buffer.index(2 * stage))
            tma.async_copy_global_to_shared(x, [first + _HALF, begin], ready, a_buffer.index(2 * stage + 1))
        step += 1
    return step


@gluon.jit
def _produce(
    x, x_stride, w, pairs, blocks, count, group, a_buffer, b_buffer, full, empty,
    DEPTH: gl.constexpr, SIZE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr,
):  # fmt: skip
    """The producer: copies the operands of this program's tiles. The next tile's place, and then its tokens, are loaded
    between copies, so that their latency is hidden."""
    WIDTH: gl.constexpr = _PANEL if GATED else 2 * _PANEL
    TILES: gl.constexpr = SIZE // WIDTH
    EXPERT: gl.constexpr = 2 * SIZE if GATED else SIZE
    SECOND: gl.constexpr = SIZE if GATED else _PANEL
    HALFWAY: gl.constexpr = DEPTH // _STEP // 2 * _STEP
    step = 0
    tile = gl.program_id(0)
    expert, first, end, n = _place(tile, blocks, count, group, TILES)
    token = first
    if GATED:
        token = _tokens(pairs, first, end, TOP_K)
    while tile < count * TILES:
        tile += gl.num_programs(0)
        column = expert * EXPERT + n * WIDTH
        expert, next_first, end, n = _place(tile, blocks, count, group, TILES)
        step = _copy(
            x, x_stride, w, token, first, column, step, a_buffer, b_buffer, full, empty, 0, HALFWAY, SECOND, GATED
        )
        next_token = next_first
        if GATED:
            next_token = _tokens(pairs, next_first, end, TOP_K)
        step = _copy(
            x, x_stride, w, token, first, column, step, a_buffer, b_buffer, full, empty, HALFWAY, DEPTH, SECOND, GATED
        )
        first = next_first
        token = next_token


@gluon.jit
def _release(empty, step, pred):
    # One thread arrives for the warpgroup, but a warp knows only that its own products are done: so all meet first.
    _meet()
    mbarrier.arrive(empty.index(step % _STAGES), count=1, pred=pred)


@gluon.jit
def _multiply(
    a_buffer, b_buffer, full, empty, begin, half: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """A warpgroup's half [_HALF, 2 * _PANEL] of the tile whose first step is `begin`. A stage is freed when its product
    is done, which is waited for only after the next one's has been started."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _PANEL, 16])
    weights = b_buffer._reinterpret(b_buffer.dtype, [_STAGES, 2 * _PANEL, _STEP], b_buffer.layout)
    acc = gl.zeros([_HALF, 2 * _PANEL], gl.float32, layout)
    for i in range(STEPS):
        step = begin + i
        stage = step % _STAGES
        mbarrier.wait(full.index(stage), step // _STAGES & 1)
        if GATED:
            fence_async_shared()  # rows were written by ordinary copies, but tensor cores read by the async proxy
        acc = warpgroup_mma(a_buffer.index(2 * stage + half), weights.index(stage).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        _release(empty, step + _STAGES - 1, i > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(empty, begin + STEPS - 1, True)
    return acc


@gluon.jit
def _store(out, acc, row, keep, n, SIZE: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr):
    """Writes a warpgroup's half of a tile to the given rows of out, where `keep`; GATED: silu(gate) * up of it."""
    left, right = acc.reshape([_HALF, 2, _PANEL]).permute([0, 2, 1]).split()
    target = out + row.to(gl.int64)[:, None] * SIZE + gl.arange(0, _PANEL, layout=gl.SliceLayout(0, layout))[None, :]
    if GATED:
        value = left * (1 / (1 + gl.exp(-left))) * right
        value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
        gl.store(target + n * _PANEL, value, keep[:, None])
    else:
        target += n * 2 * _PANEL
        gl.store(target, gl.convert_layout(left.to(out.dtype.element_ty), layout), keep[:, None])
        gl.store(target + _PANEL, gl.convert_layout(right.to(out.dtype.element_ty), layout), keep[:, None])


@gluon.jit
def _consume(
    out, pairs, blocks, count, group, a_buffer, b_buffer, full, empty,
    half: gl.constexpr, DEPTH: gl.constexpr, SIZE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: computes its half of the rows of this program's tiles. GATED writes activations in sorted
    order, else results go to their pairs' rows. The next tile's place is loaded while this one is multiplied."""
    STEPS: gl.constexpr = DEPTH // _STEP
    TILES: gl.constexpr = SIZE // (_PANEL if GATED else 2 * _PANEL)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // _PANEL, _PANEL // 8], [4, 1], [1, 0])
    begin = 0
    tile = gl.program_id(0)
    expert, first, end, n = _place(tile, blocks, count, group, TILES)
    while tile < count * TILES:
        tile += gl.num_programs(0)
        expert, next_first, next_end, next_n = _place(tile, blocks, count, group, TILES)
        row = first + half * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout))
        keep = row < end
        if first + half * _HALF < end:
            if not GATED:
                row = gl.load(pairs + row, keep, other=0)
            acc = _multiply(a_buffer, b_buffer, full, empty, begin, half, STEPS, GATED)
            _store(out, acc, row, keep, n, SIZE, GATED, layout)
        else:
            for step in range(begin, begin + STEPS):
                mbarrier.wait(full.index(step % _STAGES), step // _STAGES & 1)
                _release(empty, step, True)
        begin += STEPS
        first = next_first
        end = next_end
        n = next_n


@gluon.jit(do_not_specialize=["group"])
def hopper_kernel(
    x, x_stride, w, out, pairs, blocks, num_blocks, group,
    DEPTH: gl.constexpr, SIZE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [P, SIZE] from rows [*, DEPTH] of x: as gate_up_kernel if GATED, else as down_kernel, where x is a
    descriptor."""
    count = gl.load(num_blocks)
    if gl.program_id(0) >= count * (SIZE // (_PANEL * (1 if GATED else 2))):
        return
    dtype: gl.constexpr = w.dtype
    a_buffer = gl.allocate_shared_memory(dtype, [2 * _STAGES, _HALF, _STEP], w.layout)
    b_buffer = gl.allocate_shared_memory(dtype, [2 * _STAGES, _PANEL, _STEP], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        # GATED: each of the producer's 128 threads arrives when its gathered numbers are there, and TMA once.
        mbarrier.init(full.index(stage), count=129 if GATED else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (out, pairs, blocks, count, group, a_buffer, b_buffer, full, empty, zero, DEPTH, SIZE, GATED)),
            (_consume, (out, pairs, blocks, count, group, a_buffer, b_buffer, full, empty, one, DEPTH, SIZE, GATED)),
            (_produce, (
                x, x_stride, w, pairs, blocks, count, group, a_buffer, b_buffer, full, empty, DEPTH, SIZE, GATED, TOP_K,
            )),
        ],
        [4, 4 if GATED else 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def supports(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether `products` can do it: Hopper, 16-bit types, sizes that are whole tiles, aligned rows."""
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    _, width, inner = down.shape
    fits = width % COLUMNS == inner % (COLUMNS // 2) == 0
    aligned = x.stride(0) % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in (x, gate_up, down))
    return fits and aligned and x.element_size() == 2 and x.dtype == gate_up.dtype == down.dtype


def is_chosen(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, num_pairs: int) -> bool:
    """Whether `products` can do it and is faster than the portable kernels. num_pairs: as tiles.measured_pairs gives
    it."""
    return num_pairs >= MIN_ROWS * len(down) and supports(x, gate_up, down)


def _descriptor(matrix: torch.Tensor, num_rows: int) -> TensorDescriptor:
    """A descriptor of a matrix by blocks of num_rows rows and DEPTH columns."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [num_rows, DEPTH], layout)


def registers(gated: bool) -> tuple[int, int]:
    """(registers of a consumer thread, of a producer thread). Gathering needs registers for addresses."""
    return (216, 72) if gated else (240, 24)


def product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, order: SortedPairs, top_k: int, gated: bool) -> None:
    """One of the two products, for inputs that `supports` accepts and pairs sorted in blocks of ROWS.

    gated: out [P, I], in sorted order, = silu(x gate) * (x up), with x [T, D] by token and w [E_r, 2 I, D] or
    [E_r, 2, I, D], contiguous. Else: out [P, D], by pair, = x down, with x [P, I] in sorted order and w [E_r, D, I].
    """
    num_pairs, size = out.shape
    consumer, producer = registers(gated)
    columns = COLUMNS // 2 if gated else COLUMNS
    assert size % columns == 0 and x.shape[1] % DEPTH == 0
    most = max_blocks(num_pairs, len(w), ROWS) * (size // columns)
    hopper_kernel[(min(most, limits(x.device).processors),)](
        x if gated else _descriptor(x, ROWS // 2), x.stride(0), _descriptor(w.flatten(0, -2), COLUMNS // 2),
        out, order.pairs, order.blocks, order.num_blocks, GROUP,
        DEPTH=x.shape[1], SIZE=size, GATED=gated, TOP_K=top_k,
        CONSUMER_REGISTERS=consumer, PRODUCER_REGISTERS=producer, num_warps=4,
    )  # fmt: skip


def products(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, order: SortedPairs, top_k: int
) -> torch.Tensor:
    """[P, D]: for each pair of an expert on this rank (those in `order`), the expert applied to the token's row of x
    [T, D]. Rows of other pairs stay undefined."""
    num_pairs = len(order.pairs)
    _, width, inner = down.shape
    hidden = x.new_empty((num_pairs, inner))
    product(x, gate_up, hidden, order, top_k, True)
    y = x.new_empty((num_pairs, width))
    product(hidden, down, y, order, top_k, False)
    return y
