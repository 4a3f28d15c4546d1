"""The sampling noise: known values, and that it is as random as the sampler takes it to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splash_trt.runtime import noise

torch.set_num_threads(1)
CPU = torch.device("cpu")


def unsigned(x: torch.Tensor) -> list[int]:
    return [int(v) for v in x.numpy().view(np.uint64)]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, first_id: int, num_ids: int) -> np.ndarray:
    keys = noise.row_keys(*torch.broadcast_tensors(seeds, positions))
    return noise.uniform(noise.hashes(keys, noise.id_steps(first_id, num_ids, CPU))).numpy()


def assert_chi_square(counts: np.ndarray, expected: np.ndarray) -> None:
    """Within 5 standard deviations of what chance gives (Wilson-Hilferty: the cube root is nearly normal)."""
    degrees = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert abs(z) < 5, (statistic, degrees)


def test_published_splitmix64_outputs() -> None:
    key = torch.tensor([1234567])
    got = noise.hashes(key, noise.id_steps(0, 5, CPU))[0]
    want = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert unsigned(got) == want


def test_row_keys_match_integers_without_bounds() -> None:
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, 2**63 - 1, 987654321], [0, 131071, 5, 2**31 - 1]
    want = [mix((mix((s + gamma) & mask) + (p + 1) * gamma) & mask) for s, p in zip(seeds, positions, strict=True)]
    assert unsigned(noise.row_keys(torch.tensor(seeds), torch.tensor(positions))) == want


def test_depends_on_nothing_but_seed_position_and_id() -> None:
    seeds, positions = torch.arange(40), torch.arange(40) * 3
    whole = noise.gumbel(noise.row_keys(seeds, positions), noise.id_steps(0, 1000, CPU))
    some = torch.tensor([31, 2, 17])
    part = noise.gumbel(noise.row_keys(seeds[some], positions[some]), noise.id_steps(613, 11, CPU))
    # The integers are the same; the logarithms of a differently aligned array may round differently.
    torch.testing.assert_close(part, whole[some, 613:624], rtol=1e-14, atol=1e-14)


def test_uniform_stays_inside_its_ends() -> None:
    ends = noise.uniform(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert ((ends > 0) & (ends < 1)).all()
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]


@pytest.mark.parametrize("varying", ["seed", "position", "id", "far seeds"])
def test_uniform_along_each_axis(varying: str) -> None:
    n, many = torch.zeros(1, dtype=torch.int64), torch.arange(200_000)
    u = {
        "seed": lambda: uniforms(many, n, 7, 1),
        "position": lambda: uniforms(n, many, 7, 1),
        "id": lambda: uniforms(n, n, 0, 200_000),
        "far seeds": lambda: uniforms(many << 45, n, 7, 1),
    }[varying]().ravel()
    assert_chi_square(np.bincount((u * 1000).astype(int), minlength=1000), np.full(1000, 200.0))
    # Neighbours along the axis: each pair of cells as often as any other.
    pairs = (u[:-1] * 30).astype(int) * 30 + (u[1:] * 30).astype(int)
    assert_chi_square(np.bincount(pairs, minlength=900), np.full(900, len(pairs) / 900))


def test_no_correlation_between_neighbouring_rows() -> None:
    n = 100_000
    one = torch.ones(1, dtype=torch.int64)
    pairs = {
        "seeds": (uniforms(one, one, 0, n), uniforms(one + 1, one, 0, n)),
        "positions": (uniforms(one, one, 0, n), uniforms(one, one + 1, 0, n)),
        "swapped": (uniforms(one, one + 1, 0, n), uniforms(one + 1, one, 0, n)),
        "shifted ids": (uniforms(one, one, 1, n), uniforms(one, one + 1, 0, n)),
    }
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(n), name


def test_each_seed_bit_moves_half_of_the_output() -> None:
    seeds = torch.randint(0, 2**62, (500,), generator=torch.Generator().manual_seed(0))
    positions = torch.zeros_like(seeds)
    step = noise.id_steps(3, 1, CPU)
    base = noise.hashes(noise.row_keys(seeds, positions), step).numpy()
    for bit in range(63):
        flipped = noise.hashes(noise.row_keys(seeds ^ (1 << bit), positions), step).numpy()
        moved = np.unpackbits((base ^ flipped).view(np.uint8)).mean()
        assert 0.48 < moved < 0.52, bit


def test_gumbel_distribution() -> None:
    g = noise.gumbel(noise.row_keys(torch.arange(200), torch.arange(200)), noise.id_steps(0, 1000, CPU)).numpy()
    edges = -np.log(-np.log(np.arange(1, 100) / 100))
    assert_chi_square(np.bincount(np.searchsorted(edges, g.ravel()), minlength=100), np.full(100, 2000.0))
    assert np.isfinite(g).all()
