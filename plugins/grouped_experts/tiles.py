"""Which tiles the expert products run with, by how many rows an expert gets; the table was measured on an H200.

T tokens, k choices a token, E_r experts here, D hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FEW_PAIRS = 512
"""Up to so many (token, choice) pairs, programs find their rows themselves, which saves the launch that sorts."""
MAX_PAIRS = 65536
"""More pairs than this are done in parts, so that temporaries stay below 2 * 65,536 rows of max(D, I)."""
RESERVED_BYTES = 2048
"""Of a block's shared memory, for barriers and what reductions pass between warps."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Of one product: block sizes, warps, software pipeline stages, and how programs share the tiles out."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    """Blocks of rows that are done on one tile of columns before the next one."""
    per_processor: int = 1
    """Programs that a multiprocessor runs at once."""
    tma: bool = False
    """Weights come through the tensor memory accelerator (compute capability 9.0 and up)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one call is done. Both products have the same m where pairs are sorted."""

    few: bool
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a block of threads may use, and how many multiprocessors there are."""

    processors: int
    shared_bytes: int
    tma: bool


# Pairs per expert here (T * k / E_r, at most) -> tiles of the first and of the second product. Measured on two
# ranks: with whole experts, where half of the pairs are here, and the first four with experts cut inside, as
# measured_pairs has it.
TABLE = (
    (0.25, Tiles(m=16, n=32, k=128, warps=4, stages=5), Tiles(m=16, n=64, k=128, warps=4, stages=4)),
    (1, Tiles(m=16, n=32, k=128, warps=4, stages=3, tma=True), Tiles(m=16, n=64, k=128, warps=4, stages=3, tma=True)),
    (4, Tiles(m=16, n=32, k=128, warps=4, stages=3, tma=True), Tiles(m=16, n=128, k=128, warps=4, stages=3, tma=True)),
    (
        24,
        Tiles(m=16, n=64, k=128, warps=4, stages=3, per_processor=2, tma=True),
        Tiles(m=16, n=128, k=128, warps=4, stages=3, per_processor=2, tma=True),
    ),
    (
        48,
        Tiles(m=32, n=64, k=128, warps=4, stages=3, per_processor=2),
        Tiles(m=32, n=128, k=64, warps=4, stages=4, per_processor=2),
    ),
    (
        160,
        Tiles(m=64, n=64, k=64, warps=4, stages=4, per_processor=2),
        Tiles(m=64, n=128, k=64, warps=4, stages=4, per_processor=2),
    ),
    (1 << 60, Tiles(m=128, n=128, k=64, warps=8, stages=4), Tiles(m=128, n=256, k=64, warps=8, stages=4)),
)


def fit(tiles: Tiles, operands: int, depth: int, width: int, itemsize: int, device: Device) -> Tiles:
    """The tiles cut down to a [*, depth] by [operands * width, depth] product and to the device's shared memory."""
    n, k = min(tiles.n, max(16, _power_of_2(width))), min(tiles.k, max(16, _power_of_2(depth)))
    m, stages = tiles.m, tiles.stages
    if itemsize == 4:
        # float32 products run on the ordinary units: registers hold both operands.
        m, n, k = min(m, 32), min(n, 32), min(k, 32)
    shared_bytes = device.shared_bytes - RESERVED_BYTES
    while (room := shared_bytes // ((m + operands * n) * k * itemsize)) < 2 and k > 16:
        k //= 2
    tma = tiles.tma and device.tma and depth * itemsize % 16 == 0
    return replace(tiles, m=m, n=n, k=k, stages=max(1, min(stages, room)), tma=tma)


def measured_pairs(num_pairs: int, all_here: bool) -> int:
    """How many pairs gave an expert as many rows when the table was measured; all_here: every pair's expert is here."""
    return 2 * num_pairs if all_here else num_pairs


def choose(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inner: int,
    itemsize: int,
    device: Device,
    all_here: bool = False,
) -> Plan:
    """The measured plan for [num_tokens, top_k] choices over num_experts experts here, or over more (all_here: not)."""
    pairs = num_tokens * top_k
    gate_up, down = next(row[1:] for row in TABLE if measured_pairs(pairs, all_here) <= row[0] * num_experts)
    gate_up = fit(gate_up, 2, hidden, inner, itemsize, device)
    down = fit(down, 1, inner, hidden, itemsize, device)
    few = pairs <= FEW_PAIRS
    return Plan(few=few, gate_up=gate_up, down=down)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
