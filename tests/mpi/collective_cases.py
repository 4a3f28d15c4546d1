"""What every implementation of Collectives must do. Each case runs on all ranks, wherever those live.

Inputs are a function of (case, rank), so that every rank can make all ranks' inputs and compute the truth with plain
torch. `device` is where tensors live. Sums are compared exactly: the implementations add in rank order, in float32 or
wider; where one may not (`exact` false), within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from splash_trt.dist.collectives import Collectives

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64)
CPU = torch.device("cpu")


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Rank `rank`'s input."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-1000, 1000, shape, generator=generator).to(torch.float64).div(8).to(dtype).to(device)


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum with 16-bit floats added in float32."""
    wide = torch.float32 if parts[0].dtype is torch.bfloat16 else parts[0].dtype
    total = torch.zeros_like(parts[0], dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    assert actual.device == expected.device and actual.is_contiguous()
    assert torch.equal(actual, expected), (actual - expected).abs().max()


def count_sets(size: int) -> list[list[int]]:
    """Row counts per rank: even, uneven, with zeros, one rank alone, none at all."""
    return [
        [3] * size,
        [rank + 1 for rank in range(size)],
        [(rank * 3) % 4 for rank in range(size)],
        [5 if rank == size - 1 else 0 for rank in range(size)],
        [0] * size,
    ]


def all_reduce(c: Collectives, device: torch.device) -> None:
    for dtype in DTYPES:
        # Scalars, nothing, fewer elements than ranks, small, large (another algorithm), large and odd.
        for seed, shape in enumerate([(), (0,), (4, 0), (2,), (7, 5), (64, 1024), (97, 1013)]):
            parts = [part_of(rank, shape, dtype, device, seed) for rank in range(c.size)]
            same(c.all_reduce(parts[c.rank].clone()), total_of(parts))


def all_reduce_of_bf16_rounds_once(c: Collectives, device: torch.device) -> None:
    # 256 + 1 is 256 in bf16: one 1 after the other would be lost, their sum in float32 is not.
    for length in (3, 40000):
        x = torch.full((length,), 256.0 if c.rank == 0 else 1.0, dtype=torch.bfloat16, device=device)
        expected = torch.tensor(256.0 + c.size - 1).to(torch.bfloat16).item()
        assert c.all_reduce(x).tolist() == [expected] * length


def all_gather(c: Collectives, device: torch.device) -> None:
    for dtype in DTYPES:
        for seed, counts in enumerate(count_sets(c.size)):
            for tail in ((), (6,), (3, 5), (0,)):
                parts = [part_of(rank, (counts[rank], *tail), dtype, device, seed) for rank in range(c.size)]
                same(c.all_gather(parts[c.rank], counts), torch.cat(parts))


def reduce_scatter(c: Collectives, device: torch.device) -> None:
    for dtype in DTYPES:
        for seed, counts in enumerate(count_sets(c.size)):
            for tail in ((), (6,), (0,), (3, 1000)):
                parts = [part_of(rank, (sum(counts), *tail), dtype, device, seed) for rank in range(c.size)]
                same(c.reduce_scatter(parts[c.rank], counts), total_of(parts).split(counts)[c.rank])


def all_to_all(c: Collectives, device: torch.device) -> None:
    for dtype in DTYPES:
        for seed in range(4):
            for rows in ((seed + 1) * 2, 2000):

                def sent(source: int, target: int, seed: int = seed, rows: int = rows) -> tuple[int, ...]:
                    """Shapes that differ by pair in rank and size; some are empty, with seed 3 all but one."""
                    if seed == 3 and (source, target) != (0, c.size - 1):
                        return (0, 7)
                    step = (source + 2 * target + seed) % 4
                    return [(rows,), (step, 5), (0,), (2, step, 3)][step]

                send = [part_of(c.rank, sent(c.rank, j), dtype, device, seed + j) for j in range(c.size)]
                received = c.all_to_all(send, [sent(i, c.rank) for i in range(c.size)])
                assert len(received) == c.size
                for source, part in enumerate(received):
                    same(part, part_of(source, sent(source, c.rank), dtype, device, seed + c.rank))


def results_are_new_memory(c: Collectives, device: torch.device) -> None:
    """What a rank does to its input or result afterwards reaches nobody else."""
    counts = [2] * c.size
    x = torch.full((2, 3), float(c.rank), device=device)
    gathered = c.all_gather(x, counts)
    received = c.all_to_all([x] * c.size, [(2, 3)] * c.size)
    scattered = c.reduce_scatter(torch.ones(2 * c.size, 3, device=device), counts)
    reduced = c.all_reduce(torch.ones(2, 3, device=device))
    x.fill_(-1)
    everything = [gathered, *received, scattered, reduced]
    c.all_reduce(torch.ones(1, device=device))
    expected = torch.arange(c.size, device=device).repeat_interleave(2)
    assert torch.equal(gathered[:, 0], expected)
    assert all(torch.equal(part, torch.full_like(part, source)) for source, part in enumerate(received))
    assert torch.equal(scattered, torch.full_like(scattered, c.size))
    assert torch.equal(reduced, torch.full_like(reduced, c.size))
    for part in everything:
        before = part.clone()
        c.all_reduce(torch.ones(1, device=device))
        assert torch.equal(part, before)
        part.fill_(100 + c.rank)
        c.all_reduce(torch.ones(1, device=device))
        assert torch.equal(part, torch.full_like(part, 100 + c.rank))


def inputs_are_left_alone(c: Collectives, device: torch.device) -> None:
    counts = [1] * c.size
    x = part_of(c.rank, (1, 40000), torch.float32, device)
    whole = part_of(c.rank, (c.size, 40000), torch.float32, device)
    before, whole_before = x.clone(), whole.clone()
    c.all_gather(x, counts).fill_(7)
    for part in c.all_to_all([x] * c.size, [(1, 40000)] * c.size):
        part.fill_(7)
    c.reduce_scatter(whole, counts).fill_(7)
    assert torch.equal(x, before) and torch.equal(whole, whole_before)


def views_are_accepted_if_contiguous_only(c: Collectives, device: torch.device) -> None:
    pool = part_of(c.rank, (5, 6), torch.bfloat16, device)
    same(c.all_gather(pool[2:4], [2] * c.size)[2 * c.rank :][:2], pool[2:4])
    counts = [6] * c.size
    for call in (
        lambda: c.all_gather(pool.T, counts),
        lambda: c.all_reduce(pool.T),
        lambda: c.reduce_scatter(torch.ones(3, 6 * c.size, device=device).T, counts),
        lambda: c.all_to_all([pool.T] * c.size, [(6, 5)] * c.size),
    ):
        try:
            call()
        except AssertionError:
            continue
        raise RuntimeError("a non-contiguous input was taken")


CASES: tuple[Callable[[Collectives, torch.device], None], ...] = (
    all_reduce,
    all_reduce_of_bf16_rounds_once,
    all_gather,
    reduce_scatter,
    all_to_all,
    results_are_new_memory,
    inputs_are_left_alone,
    views_are_accepted_if_contiguous_only,
)


def check_bytes_sent(c: Collectives, counted: dict[str, int], device: torch.device) -> None:
    """`counted` is the implementation's own `bytes_sent`: bytes to others, each once per rank that needs it."""
    before = dict(counted)
    others = c.size - 1
    counts = [rank + 1 for rank in range(c.size)]
    c.all_gather(torch.ones(counts[c.rank], 10, device=device), counts)
    c.reduce_scatter(torch.ones(sum(counts), 10, device=device), counts)
    c.all_reduce(torch.ones(6 * c.size, device=device))
    c.all_to_all([torch.ones(rank + 1, device=device) for rank in range(c.size)], [(c.rank + 1,)] * c.size)
    grown = {name: counted[name] - before[name] for name in counted}
    assert grown == {
        "all_gather": others * counts[c.rank] * 40,
        "reduce_scatter": (sum(counts) - counts[c.rank]) * 40,
        "all_reduce": 2 * others * 6 * 4,
        "all_to_all": (sum(counts) - counts[c.rank]) * 4,
    }, grown
