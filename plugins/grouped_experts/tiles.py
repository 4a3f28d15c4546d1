"""Chooses the tiles of the experts' products, by how many rows an expert gets, from a table measured on an H200.

T tokens, k choices a token, E_r experts on this rank, D hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FEW_PAIRS = 512
"""Up to this many (token, choice) pairs, programs find their rows themselves, which saves the launch that sorts."""
MAX_PAIRS = 65536
"""More pairs than this are processed in parts, so that temporaries stay below 2 * 65,536 rows of max(D, I)."""
RESERVED_BYTES = 2048
"""Shared memory of a block of threads that is kept for barriers and for what reductions pass between warps."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How one product is cut: rows, columns and depth of a block (m, n, k), warps, software pipeline stages, and how
    programs share the tiles."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    """Blocks of rows that are multiplied with one tile of columns before the next one."""
    per_processor: int = 1
    """Programs that a multiprocessor runs at once."""
    tma: bool = False
    """Weights are loaded by the tensor memory accelerator (from compute capability 9.0 on)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one call is computed. Both products have the same m where pairs are sorted."""

    few: bool
    """Pairs are not sorted: programs find their rows themselves (few_kernel.py)."""
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True, kw_only=True)
class Device:
    """How many multiprocessors a GPU has, the shared memory that a block of threads may use, whether there is TMA."""

    processors: int
    shared_bytes: int
    tma: bool


# Up to this many pairs per expert (T * k / E_r): tiles of the first product, tiles of the second. Measured with two
# ranks and whole experts, where half of the pairs are a rank's own; the first four entries also with experts cut
# inside, for which measured_pairs converts.
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
    """The tiles, reduced to fit a product of [*, depth] with [operands * width, depth] and the device's shared
    memory."""
    n, k = min(tiles.n, max(16, _power_of_2(width))), min(tiles.k, max(16, _power_of_2(depth)))
    m, stages = tiles.m, tiles.stages
    if itemsize == 4:
        # float32 products do not run on tensor cores: registers hold both operands.
        m, n, k = min(m, 32), min(n, 32), min(k, 32)
    shared_bytes = device.shared_bytes - RESERVED_BYTES
    while (room := shared_bytes // ((m + operands * n) * k * itemsize)) < 2 and k > 16:
        k //= 2
    tma = tiles.tma and device.tma and depth * itemsize % 16 == 0
    return replace(tiles, m=m, n=n, k=k, stages=max(1, min(stages, room)), tma=tma)


def measured_pairs(num_pairs: int, all_here: bool) -> int:
    """The number of pairs that gave an expert as many rows when the table was measured, where half of the pairs were
    the rank's own. all_here: all pairs are."""
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
    """The measured plan for [num_tokens, top_k] choices and num_experts experts on this rank. all_here: the choices are
    among these alone, not over those of other ranks too."""
    pairs = num_tokens * top_k
    gate_up, down = next(row[1:] for row in TABLE if measured_pairs(pairs, all_here) <= row[0] * num_experts)
    gate_up = fit(gate_up, 2, hidden, inner, itemsize, device)
    down = fit(down, 1, inner, hidden, itemsize, device)
    few = pairs <= FEW_PAIRS
    return Plan(few=few, gate_up=gate_up, down=down)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
