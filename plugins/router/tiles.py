"""How the router's product is cut, by how many rows, experts and hidden numbers there are.

T tokens, D hidden, E experts (columns: padded as kernel.py holds them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RESERVED_BYTES = 2048
"""Of a block's shared memory, for what reductions pass between warps."""
FUSED_GROUPS = 8
"""Of experts, at most where the programs of the product choose: groups are compared each with each."""
EARLY_BYTES = 256
"""Of a slice of the router that a thread loads, into registers, before its program's rows are there."""
PAIRS = 4096
"""Of groups that a program of choose_kernel compares at most."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    rows: int
    """Tokens of a program that makes logits."""
    columns: int
    """Experts of it."""
    block_k: int
    warps: int
    stages: int
    slices: int = 1
    """Of D, each for programs of its own."""
    fused: bool = False
    """One launch: the programs that make the logits, all of a row's, choose. Else another one adds and chooses."""
    choose_rows: int = 2
    """Tokens of a program, one warp, that adds and chooses."""

    def slice_width(self, width: int) -> int:
        """Of D, whole blocks; the last slice may be narrower."""
        return -(-width // (self.slices * self.block_k)) * self.block_k

    def early(self, width: int, itemsize: int) -> bool:
        """Whether programs load all they need of the router before their rows are there."""
        return self.slice_width(width) * self.columns * itemsize <= EARLY_BYTES * 32 * self.warps


@dataclass(frozen=True)
class Form:
    """What to do up to so many tokens."""

    tokens: int
    tiles: Tiles
    programs: int = 0
    """About so many, at most, by cutting D into slices; 0: it is not cut."""
    depth: int = 128
    """Of a slice at least."""


MANY = 1 << 60
# Few rows: many programs, each of which loads its part of the router before the rows are there. More rows: tiles that
# read the router less often (every block of rows reads it, from the L2). Measured on an H200, for 64 experts
# (D 2,048) and 256 (7,168): perf/kernels_router.py.
NARROW = (
    Form(128, Tiles(rows=16, columns=32, block_k=128, warps=4, stages=4, choose_rows=1), programs=256),
    Form(256, Tiles(rows=32, columns=128, block_k=128, warps=4, stages=4, choose_rows=1), programs=128),
    Form(512, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4, choose_rows=1), programs=128),
    Form(2048, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4), programs=128),
    Form(4096, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4, choose_rows=4), programs=128),
    Form(8192, Tiles(rows=64, columns=128, block_k=128, warps=4, stages=4, fused=True)),
    Form(MANY, Tiles(rows=128, columns=128, block_k=128, warps=8, stages=4, fused=True)),
)
"""Up to 128 columns."""
WIDE = (
    Form(32, Tiles(rows=16, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=256, depth=256),
    Form(64, Tiles(rows=32, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=256, depth=256),
    Form(128, Tiles(rows=64, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=128, depth=512),
    Form(512, Tiles(rows=64, columns=64, block_k=128, warps=4, stages=4, choose_rows=1), programs=128, depth=1024),
    Form(8192, Tiles(rows=128, columns=128, block_k=64, warps=8, stages=4, choose_rows=1), programs=128, depth=512),
    Form(MANY, Tiles(rows=128, columns=256, block_k=64, warps=8, stages=3, choose_rows=1)),
)
"""More."""


def choose_tiles(num_rows: int, groups: int, columns: int, width: int, itemsize: int, shared_bytes: int) -> Tiles:
    """For [num_rows, width] rows of numbers of itemsize bytes, within a block's shared memory."""
    form = next(form for form in (NARROW if columns <= 128 else WIDE) if num_rows <= form.tokens)
    tiles = fit(form.tiles, groups, columns, width, itemsize, shared_bytes)
    blocks = -(-num_rows // tiles.rows) * -(-columns // tiles.columns)
    slices = min(width // form.depth, _power_of_2_below(form.programs // blocks))
    return replace(tiles, slices=max(1, slices))


def fit(tiles: Tiles, groups: int, columns: int, width: int, itemsize: int, shared_bytes: int) -> Tiles:
    """The tiles cut down to the product and to the device's shared memory."""
    rows, n, k = tiles.rows, min(tiles.columns, columns), min(tiles.block_k, max(16, _power_of_2(width)))
    if itemsize == 4:
        # float32 products run on the ordinary units: registers hold both operands.
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
    """Of a program of choose_kernel: so many, a power of two, as far as PAIRS allows."""
    return max(1, min(rows, PAIRS // groups**2))


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _power_of_2_below(n: int) -> int:
    """The largest power of two that is at most n; 0: none."""
    return 1 << (n.bit_length() - 1) if n else 0
