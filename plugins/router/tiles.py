"""Chooses how the router's product is cut, by the numbers of rows and experts and the hidden size.

T tokens, D hidden, E experts; columns: experts as kernel.py pads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RESERVED_BYTES = 2048
"""Shared memory of a block of threads that is kept for what reductions pass between warps."""
FUSED_GROUPS = 8
"""With more groups of experts than this, one launch does not do both: every group is compared with every other."""
EARLY_BYTES = 256
"""The most of the router's weights that a thread loads into registers before its program's rows are there."""
PAIRS = 4096
"""The most pairs of groups that a program of choose_kernel compares."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    rows: int
    """Tokens of a program that computes logits."""
    columns: int
    """Experts of such a program."""
    block_k: int
    warps: int
    stages: int
    slices: int = 1
    """How many slices D is cut into; each has programs of its own."""
    fused: bool = False
    """One launch: programs compute all logits of their rows and choose. Else a second launch adds up and chooses."""
    choose_rows: int = 2
    """Tokens of a program, one warp, of that second launch."""

    def slice_width(self, width: int) -> int:
        """The size of a slice of D, in whole blocks; the last slice may be narrower."""
        return -(-width // (self.slices * self.block_k)) * self.block_k

    def early(self, width: int, itemsize: int) -> bool:
        """Whether programs load all that they need of the router's weights before their rows are there."""
        return self.slice_width(width) * self.columns * itemsize <= EARLY_BYTES * 32 * self.warps


@dataclass(frozen=True)
class Form:
    """How the product is cut up to some number of tokens."""

    tokens: int
    """Up to this many."""
    tiles: Tiles
    programs: int = 0
    """D is cut into slices to have about this many programs, at most; 0: it is not cut."""
    depth: int = 128
    """The least width of a slice."""


MANY = 1 << 60
# For few rows there are many programs, each of which loads its part of the router's weights before the rows are there.
# For more rows, tiles are larger, so that weights are read less often (every block of rows reads them, from the L2).
# Measured on an H200, for 64 experts (D 2,048) and 256 (7,168): perf/kernels_router.py.
NARROW = (
    Form(128, Tiles(rows=16, columns=32, block_k=128, warps=4, stages=4, choose_rows=1), programs=256),
    Form(256, Tiles(rows=32, columns=128, block_k=128, warps=4, stages=4, choose_rows=1), programs=128),
    Form(512, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4, choose_rows=1), programs=128),
    Form(2048, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4), programs=128),
    Form(4096, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4, choose_rows=4), programs=128),
    Form(8192, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4, fused=True)),
    Form(MANY, Tiles(rows=128, columns=128, block_k=128, warps=8, stages=4, fused=True)),
)
"""For up to 128 columns."""
WIDE = (
    Form(32, Tiles(rows=16, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=256, depth=256),
    Form(64, Tiles(rows=32, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=256, depth=256),
    Form(128, Tiles(rows=64, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=128, depth=512),
    Form(512, Tiles(rows=64, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=128, depth=1024),
    Form(8192, Tiles(rows=128, columns=128, block_k=64, warps=8, stages=4, choose_rows=1), programs=128, depth=512),
    Form(MANY, Tiles(rows=128, columns=256, block_k=64, warps=8, stages=3, choose_rows=1)),
)
"""For more columns."""


def choose_tiles(num_rows: int, groups: int, columns: int, width: int, itemsize: int, shared_bytes: int) -> Tiles:
    """The tiles for rows [num_rows, width] of itemsize bytes a number, with shared_bytes for a block of threads."""
    form = next(form for form in (NARROW if columns <= 128 else WIDE) if num_rows <= form.tokens)
    tiles = fit(form.tiles, groups, columns, width, itemsize, shared_bytes)
    blocks = -(-num_rows // tiles.rows) * -(-columns // tiles.columns)
    slices = min(width // form.depth, _power_of_2_below(form.programs // blocks))
    return replace(tiles, slices=max(1, slices))


def fit(tiles: Tiles, groups: int, columns: int, width: int, itemsize: int, shared_bytes: int) -> Tiles:
    """The tiles, reduced to fit the product and the device's shared memory."""
    rows, n, k = tiles.rows, min(tiles.columns, columns), min(tiles.block_k, max(16, _power_of_2(width)))
    if itemsize == 4:
        # float32 products do not run on tensor cores: registers hold both operands.
        rows, k = min(rows, 16), max(16, min(k, 64))
    while (room := (shared_bytes - RESERVED_BYTES) // ((rows + n) * k * itemsize)) < 2 and k > 16:
        k //= 2
    return replace(
        tiles,
        rows=rows,
        columns=n,
        block_k=k,
        stages=max(1, min(tiles.stages, room)),
        fused=tiles.fused and n == columns and groups <= FUSED_GROUPS,
        choose_rows=rows_to_choose(tiles.choose_rows, groups),
    )


def rows_to_choose(rows: int, groups: int) -> int:
    """Tokens of a program of choose_kernel: `rows`, or fewer, so that its pairs of groups stay within PAIRS."""
    return max(1, min(rows, PAIRS // groups**2))


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _power_of_2_below(n: int) -> int:
    """The largest power of two that is at most n; 0 if n is 0."""
    return 1 << (n.bit_length() - 1) if n else 0
