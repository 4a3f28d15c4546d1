"""Sampling over vocabulary shards in Triton: ids as runtime/sampler.py chooses them, and its estimates' error bound."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from splash_plugins.shard_sample import kernel, reference
from splash_trt.dist.world import ThreadWorld
from splash_trt.plan import SAMPLE, SAMPLING_DTYPE
from splash_trt.runtime import noise
from splash_trt.runtime.sampler import RowParams, Sampler

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = pytest.mark.parametrize("how", [kernel, reference], ids=["kernel", "reference"])
TEMPERATURES = [0.0, 1e-30, 1e-35, 1e-6, 0.01, 0.3, 1.0, 1.7, 100.0]


def cases(num_rows: int, num_ids: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Logits with every extreme in them, and temperatures and seeds to go with them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_ids)) * rng.choice([0.1, 1.0, 5.0, 30.0], (num_rows, 1))
    kind = np.arange(num_rows) % 12
    x[kind == 0] = np.round(x[kind == 0])  # many ties
    x[kind == 1] = 2.5  # all equal
    x[kind == 2] = 0.0
    x[kind == 3] = np.where(rng.random((np.sum(kind == 3), num_ids)) < 0.5, 0.0, -0.0)
    x[kind == 4] = -np.inf
    x[(kind == 5)[:, None] & (rng.random(x.shape) < 0.9)] = -np.inf
    x[kind == 6] *= 1e30 if dtype is not torch.float16 else 1e3
    for bad, at in ((np.nan, 7), (np.inf, 8)):
        x[(kind == at)[:, None] & (rng.random(x.shape) < 0.3)] = bad
        if num_ids:
            x[kind == at, -1] = bad
    table = np.zeros(num_rows, SAMPLING_DTYPE)
    table["temperature"] = rng.permutation(np.resize(TEMPERATURES, num_rows))
    table["top_p"], table["logprobs"] = 1.0, -1
    table["seed"] = rng.integers(0, 2**63 - 1, num_rows)
    return torch.from_numpy(x).to(dtype), table


def sampled(x: torch.Tensor, table: np.ndarray, position: np.ndarray) -> torch.Tensor:
    """What the sampler chooses from the whole vocabulary."""
    params = RowParams.build(table, position, np.full(len(table), SAMPLE))
    (found,) = ThreadWorld(1).run(lambda world: Sampler(world.collectives, 0, x.shape[1])(x.float(), params))
    return found.tokens


def found_by(
    how: ModuleType, x: torch.Tensor, table: np.ndarray, position: np.ndarray, first_id: int, device: str
) -> torch.Tensor:
    """[W, 2] float64 as best_of_shards has it."""
    found = torch.full((len(x), 2), torch.nan, dtype=torch.float64, device=device)
    columns = (torch.from_numpy(table[n].copy()).to(device) for n in ("temperature", "seed"))
    where = torch.from_numpy(position.astype(np.int64)).to(device)
    how.best_of_shard(x.to(device), *columns, where, first_id, found[:, 0], found.view(torch.int64)[:, 1])
    return found


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "num_rows, widths", [(0, [40]), (1, [3000]), (7, [1]), (7, [2500]), (36, [1024, 0, 1500]), (12, [37, 2049])]
)
def test_ids_are_the_samplers(
    how: ModuleType, num_rows: int, widths: list[int], dtype: torch.dtype, device: str
) -> None:
    x, table = cases(num_rows, sum(widths), dtype, seed=num_rows + len(widths))
    position = np.arange(num_rows) * 37
    parts, first = [], 0
    for width in widths:
        # An empty shard must lose every tie, so its id lies behind the vocabulary.
        shard = x[:, first : first + width]
        parts.append(found_by(how, shard, table, position, first if width else sum(widths), device))
        first += width
    tokens = torch.full((num_rows,), -7, device=device)
    how.best_of_shards(torch.stack(parts), tokens)
    assert tokens.tolist() == sampled(x, table, position).tolist()


@IMPLEMENTATIONS
def test_far_seeds_positions_and_ids(how: ModuleType, device: str) -> None:
    x, table = cases(24, 300, torch.float32, seed=3)
    table["temperature"] = 1.0
    table["seed"][:3] = [0, 1, 2**63 - 1]
    position = np.random.default_rng(0).integers(0, 2**31 - 1, 24)
    first = 2**31 - 301
    found = found_by(how, x, table, position, first, device).cpu()
    keys = noise.row_keys(torch.from_numpy(table["seed"].copy()), torch.from_numpy(position))
    clean = x.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    score, column = (noise.gumbel(keys, noise.id_steps(first, 300, torch.device("cpu"))) + clean).max(1)
    assert torch.equal(found.view(torch.int64)[:, 1], column + first)
    torch.testing.assert_close(found[:, 0], score, rtol=1e-14, atol=1e-14)


@IMPLEMENTATIONS
def test_temperature_in_float32(how: ModuleType, device: str) -> None:
    x, table = cases(9, 50, torch.float32, seed=1)
    table["temperature"] = [0.0, 0.5, 1.0] * 3
    found = torch.empty(9, dtype=torch.float64, device=device), torch.empty(9, dtype=torch.int64, device=device)
    columns = (torch.from_numpy(table[n].copy()).to(device) for n in ("temperature", "seed"))
    temperature, seed = columns
    how.best_of_shard(x.to(device), temperature.float(), seed, torch.arange(9).to(device), 0, *found)
    assert found[1].tolist() == sampled(x, table, np.arange(9)).tolist()


def test_scores_that_estimates_cannot_tell_apart(device: str) -> None:
    _, table = cases(6, 2500, torch.float32, seed=9)
    table["temperature"] = [0.3, 1.0, 1.7] * 2
    seed, temperature = (torch.from_numpy(table[name].copy()) for name in ("seed", "temperature"))
    drawn = noise.gumbel(noise.row_keys(seed, torch.arange(6)), noise.id_steps(0, 2500, torch.device("cpu")))
    x = (-drawn * temperature[:, None]).float()  # all scores are 0, but for the rounding of this
    got = found_by(kernel, x, table, np.arange(6), 0, device)
    assert got.view(torch.int64)[:, 1].tolist() == sampled(x, table, np.arange(6)).tolist()
    assert (got[:, 0] < 1e-5).all()


def test_strided_rows_are_read_and_nothing_else(device: str) -> None:
    x, table = cases(20, 1100, torch.float32, seed=5)
    wide = torch.full((20, 1200), 1e4)
    wide[:, 50:1150] = x
    got = found_by(kernel, wide.to(device)[:, 50:1150], table, np.arange(20), 0, device)
    assert got.view(torch.int64)[:, 1].tolist() == sampled(x, table, np.arange(20)).tolist()


@pytest.mark.parametrize("how", [kernel, reference], ids=["kernel", "reference"])
def test_best_of_shards(how: ModuleType, device: str) -> None:
    never = -torch.inf
    score = torch.tensor([[1.0, never, 0.0, 2.0], [1.0, never, 3.0, 2.0], [0.5, never, 3.0, -1.0]])
    ids = torch.tensor([[7, 0, 1, 2**40], [3, 50, 99, 2**40 + 1], [1, 20, 60, 5]])
    found = torch.stack((score.double(), ids.view(torch.float64)), dim=2).to(device)
    tokens = torch.full((4,), -1, device=device)
    how.best_of_shards(found, tokens)
    assert tokens.tolist() == [3, 0, 60, 2**40]


@triton.jit
def _estimates(hashes: Any, out: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, kernel.noise(tl.load(hashes + at).to(tl.uint64, bitcast=True)))


def test_estimates_keep_their_error_bound(device: str) -> None:
    rng = np.random.default_rng(0)
    anywhere = rng.integers(-(2**63), 2**63 - 1, 1 << 15)
    small = rng.integers(0, 2**63 - 1, 1 << 15) >> rng.integers(0, 63, 1 << 15)  # u near 0, then near 1
    near = np.array([0, 4095, 4096, -(2**63), 2**63 - 1])
    edge = np.array([int(u * 2**64) - 2**64 for u in (0.85, 0.9, 0.5)])
    around = (edge[:, None] + rng.integers(-(2**40), 2**40, (3, 100))).ravel()
    every = np.concatenate([anywhere, small, ~small, near, ~near, around])
    bits = torch.from_numpy(np.pad(every, (0, -len(every) % 1024)))
    out = torch.empty(len(bits), device=device)
    _estimates[(len(bits) // 1024,)](bits.to(device), out, BLOCK=1024)
    want = noise.uniform(bits).log_().neg_().log_().neg_()
    assert (out.cpu().double() - want).abs().max() < 1e-4  # of 1e-3 that the kernel allows for
