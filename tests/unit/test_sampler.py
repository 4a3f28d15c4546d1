"""The sampler over shards against an unsharded reference in numpy that sorts, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from splash_trt.dist.collectives import Collectives
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.plan import SAMPLE, SAMPLING_DTYPE
from splash_trt.runtime.sampler import MAX_CANDIDATES, RowParams, Sampled, Sampler, ordered_keys, top_of_shard

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.float64]
GOLDEN = 0x9E3779B97F4A7C15


def table(num_rows: int, **columns: object) -> np.ndarray:
    rows = np.zeros(num_rows, SAMPLING_DTYPE)
    rows["temperature"], rows["top_p"], rows["logprobs"] = 1.0, 1.0, -1
    rows["seed"] = np.arange(num_rows) * 7919
    for name, value in columns.items():
        rows[name] = value
    return rows


def cut(vocab_size: int, size: int, empty: bool) -> list[int]:
    """Widths of `size` shards, uneven; `empty` leaves the first of several and the last of many with nothing."""
    holders = [r for r in range(size) if not (empty and size > 1 and (r == 0 or (size > 2 and r == size - 1)))]
    marks = np.linspace(0, vocab_size, len(holders) + 1) ** 1.1
    ends = (marks / marks[-1] * vocab_size).astype(int)
    widths = [0] * size
    for holder, width in zip(holders, np.diff(ends), strict=True):
        widths[holder] = int(width)
    return widths


class Counted:
    """Collectives that note what is called."""

    def __init__(self, inner: Collectives) -> None:
        self.inner, self.rank, self.size, self.calls = inner, inner.rank, inner.size, list[str]()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return self.inner.all_reduce(x)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        self.calls.append("all_gather")
        return self.inner.all_gather(x, counts)

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        raise AssertionError("the sampler has no use for it")

    def all_to_all(self, send: Sequence[torch.Tensor], recv_shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        raise AssertionError("the sampler has no use for it")


def sample(
    logits: np.ndarray,
    rows: np.ndarray,
    position: np.ndarray | None = None,
    target: np.ndarray | None = None,
    widths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Sampled, list[str]]:
    """Rank 0's results and calls, once all ranks are found to have the same."""
    widths = [logits.shape[1]] if widths is None else widths
    position = np.arange(len(rows)) if position is None else position
    target = np.full(len(rows), SAMPLE) if target is None else target
    whole = torch.from_numpy(logits).to(dtype)

    def program(world: World) -> tuple[Sampled, list[str]]:
        comm, first = Counted(world.collectives), sum(widths[: world.rank])
        sampler = Sampler(comm, first, logits.shape[1])
        shard = whole[:, first : first + widths[world.rank]].contiguous()
        return sampler(shard, RowParams.build(rows, position, target)), comm.calls

    results = ThreadWorld(len(widths)).run(program)
    mine, calls = results[0]
    for other, other_calls in results[1:]:
        for name in ("tokens", "logprob", "top_token", "top_logprob"):
            assert torch.equal(getattr(other, name).nan_to_num(7.0), getattr(mine, name).nan_to_num(7.0)), name
        assert other_calls == calls
    return mine, calls


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    golden = np.uint64(GOLDEN)
    with np.errstate(over="ignore"):
        key = mix(np.array([seed], np.uint64) + golden)
        key = mix(key + np.uint64(position + 1) * golden)
        bits = mix(key + np.arange(1, vocab_size + 1, dtype=np.uint64) * golden)
    return -np.log(-np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52))


def kept(x: np.ndarray, row: np.void) -> np.ndarray:
    """[V] bool, by sorting."""
    with np.errstate(over="ignore"):
        p = np.exp((x - x.max()) / row["temperature"])
    p /= p.sum()
    keep = (p >= row["min_p"] * p.max()) & (x > -np.inf)
    if 0 < row["top_k"] < len(x):
        keep &= x >= np.sort(x)[::-1][row["top_k"] - 1]
    if row["top_p"] < 1:
        order = np.argsort(-np.where(keep, x, -np.inf), kind="stable")
        mass = np.cumsum(np.where(keep, p, 0)[order])
        count = np.searchsorted(mass, row["top_p"] * mass[-1]) + 1
        keep &= x >= x[order[min(count, len(x)) - 1]]
    return keep


def reference(x: np.ndarray, row: np.void, position: int) -> int:
    if row["temperature"] == 0:
        return int(np.argmax(x))
    noisy = x / row["temperature"] + gumbel(row["seed"], position, len(x))
    return int(np.argmax(np.where(kept(x, row), noisy, -np.inf)))


def log_softmax(x: np.ndarray) -> np.ndarray:
    peak = x.max(1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(1, keepdims=True))


def mixed_rows(num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Logits and parameters with every extreme in them, the logits exact in `dtype`."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(num_rows, vocab_size)) * rng.choice([0.1, 1.0, 5.0, 30.0], (num_rows, 1))
    kind = rng.integers(0, 10, num_rows)
    x[kind == 0] = np.round(x[kind == 0])  # many ties
    x[kind == 1] = 2.5  # all equal
    x[kind == 2] *= 1e30  # one has all the mass
    x[(kind == 3)[:, None] & (rng.random(x.shape) < 0.7)] = -np.inf
    x[kind == 3, vocab_size // 3] = 0.25
    x[kind == 4] = np.where(rng.random((np.sum(kind == 4), vocab_size)) < 0.5, 0.0, -0.0)  # equal, unlike in bits
    x = torch.from_numpy(x).to(dtype).double().numpy()
    rows = table(
        num_rows,
        temperature=rng.choice([0.0, 1e-3, 0.3, 1.0, 1.7, 100.0], num_rows),
        top_k=rng.choice([0, 0, 1, 2, 20, vocab_size - 1, vocab_size, 10**6], num_rows),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.1, 0.53, 0.9, 0.9997], num_rows),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.07, 0.61, 1.0], num_rows),
        seed=rng.integers(0, 2**63 - 1, num_rows),
    )
    return x, rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, empty", [(1, False), (2, False), (3, True), (4, False), (8, True)])
@pytest.mark.parametrize("vocab_size", [53, 2 * MAX_CANDIDATES])
def test_tokens_of_all_mixtures(vocab_size: int, size: int, empty: bool, dtype: torch.dtype) -> None:
    x, rows = mixed_rows(1500, vocab_size, dtype)
    position = np.arange(len(rows)) % 97
    got, _ = sample(x, rows, position, widths=cut(vocab_size, size, empty), dtype=dtype)
    want = [reference(x[i], rows[i], int(position[i])) for i in range(len(rows))]
    wrong = np.flatnonzero(got.tokens.numpy() != want)
    assert not len(wrong), (wrong[:5], rows[wrong[:5]], got.tokens[wrong[:5]], [want[i] for i in wrong[:5]])


@pytest.mark.parametrize(
    "columns",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 3},
        {"top_k": MAX_CANDIDATES + 40},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 1},
        {"temperature": 1e-320},
    ],
    ids=str,
)
def test_one_stage_alone(columns: dict[str, float]) -> None:
    x = np.random.default_rng(1).normal(size=(400, 600)) * 2
    rows = table(400, **columns)
    got, _ = sample(x, rows, widths=cut(600, 3, False))
    with np.errstate(over="ignore"):
        greedy = columns.get("temperature", 1.0) < 1e-300 or columns.get("top_k") == 1
        want = [int(x[i].argmax()) if greedy else reference(x[i], rows[i], i) for i in range(400)]
    assert got.tokens.tolist() == want


def test_a_row_draws_the_same_in_any_batch() -> None:
    x, rows = mixed_rows(200, 40, torch.float64)
    position = np.arange(200) + 11
    whole, _ = sample(x, rows, position)
    some = np.random.default_rng(0).permutation(200)[:31]
    part, _ = sample(x[some], rows[some], position[some], widths=[25, 15])
    assert torch.equal(part.tokens, whole.tokens[some])


@pytest.mark.parametrize("size, empty", [(1, False), (3, True), (4, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_targets_and_alternatives(dtype: torch.dtype, size: int, empty: bool) -> None:
    vocab_size, num_top = 61, 20  # some shards are narrower than 20
    x, rows = mixed_rows(600, vocab_size, dtype)
    rows["logprobs"] = np.arange(600) % (num_top + 1)
    rng = np.random.default_rng(3)
    target = np.where(rng.random(600) < 0.4, rng.integers(0, vocab_size, 600), SAMPLE)
    got, calls = sample(x, rows, target=target, widths=cut(vocab_size, size, empty), dtype=dtype)
    want = log_softmax(x)
    rtol, atol = (3e-7, 3e-6) if dtype is torch.float32 else (1e-13, 1e-12)
    chosen = [reference(x[i], rows[i], i) if target[i] == SAMPLE else target[i] for i in range(600)]
    assert got.tokens.tolist() == chosen
    np.testing.assert_allclose(got.logprob.numpy(), want[np.arange(600), chosen], rtol=rtol, atol=atol)
    order = np.argsort(-x, axis=1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(got.top_token.numpy(), order)
    np.testing.assert_allclose(got.top_logprob.numpy(), np.take_along_axis(want, order, 1), rtol=rtol, atol=atol)
    rounds = 4 if dtype is torch.float32 else 8
    assert calls == ["all_gather", *["all_reduce"] * rounds, "all_gather"]


def test_only_targets() -> None:
    x = np.random.default_rng(2).normal(size=(9, 30))
    target = np.arange(9) * 3
    got, calls = sample(x, table(9, top_p=0.5), target=target, widths=[10, 0, 20])
    np.testing.assert_allclose(got.logprob.numpy(), log_softmax(x)[np.arange(9), target], rtol=1e-13)
    assert got.tokens.tolist() == target.tolist() and calls == ["all_gather"]


def test_ties_go_to_the_lowest_id_across_shards() -> None:
    x = np.zeros((1, 12))
    x[0, [4, 7, 9]] = 1.0
    got, _ = sample(x, table(1, temperature=0.0, logprobs=5), widths=[3, 3, 3, 3])
    assert got.tokens.tolist() == [4] and got.top_token.tolist() == [[4, 7, 9, 0, 1]]
    assert sample(x, table(1, temperature=0.0), widths=[6, 0, 6])[0].tokens.tolist() == [4]


def test_more_alternatives_than_ids() -> None:
    got, _ = sample(np.array([[1.0, 3.0, 2.0]]), table(1, logprobs=20), widths=[1, 0, 2])
    assert got.top_token.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize(
    "columns, want",
    [
        ({}, ["all_gather"]),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "logprobs": 3}, ["all_gather"]),
        ({"top_k": 5, "min_p": 0.1}, ["all_gather"] * 2),
        ({"top_p": 0.5}, ["all_gather"] + ["all_reduce"] * 8 + ["all_gather"]),
    ],
    ids=str,
)
def test_messages(columns: dict[str, float], want: list[str]) -> None:
    assert sample(np.zeros((4, 9)), table(4, **columns), widths=[5, 4])[1] == want


def test_no_rows() -> None:
    got, calls = sample(np.zeros((0, 9)), table(0), widths=[5, 0, 4])
    assert calls == [] and got.tokens.shape == (0,) and got.tokens.dtype == torch.int64
    assert got.top_token.shape == (0, 0) and got.logprob.dtype == torch.float64


@pytest.mark.parametrize("columns", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.3}], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_a_finite_logit(bad: float, columns: dict[str, float]) -> None:
    x = np.random.default_rng(0).normal(size=(6, 10))
    clean, _ = sample(x, table(6, logprobs=2, **columns), widths=[3, 0, 7])
    x[2] = bad
    got, _ = sample(x, table(6, logprobs=2, **columns), widths=[3, 0, 7])
    assert got.tokens[2] == 0 and got.logprob[2].isnan() and got.top_logprob[2].isnan().all()
    assert got.top_token[2].tolist() == [0, 1]
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got.tokens[others], clean.tokens[others])
    assert torch.equal(got.logprob[others], clean.logprob[others])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_broken_logit_is_not_chosen_and_shows_in_the_logprob(bad: float) -> None:
    x = np.zeros((3, 8))
    x[:, 5] = bad
    x[:, 6] = 40.0
    got, _ = sample(x, table(3, temperature=[0.0, 1.0, 1.0], top_p=[1.0, 1.0, 0.9], logprobs=0), widths=[4, 4])
    assert got.tokens.tolist() == [6, 6, 6] and got.logprob.isnan().all()


@pytest.mark.parametrize("columns", [{}, {"temperature": 1.6}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.15}], ids=str)
def test_frequencies(columns: dict[str, float]) -> None:
    draws = 20_000
    x = np.random.default_rng(8).normal(size=9) * 1.3
    rows = table(draws, **columns)
    rows["seed"] = np.arange(draws) // 100  # each of few seeds at many positions, as in serving
    got, _ = sample(np.tile(x, (draws, 1)), rows, np.arange(draws) % 100, widths=[4, 5])
    p = np.where(kept(x, rows[0]), np.exp(x / rows[0]["temperature"]), 0)
    expected = p / p.sum() * draws
    counts = np.bincount(got.tokens.numpy(), minlength=9)
    assert (counts[expected == 0] == 0).all()
    on = expected > 0
    degrees = int(on.sum()) - 1
    statistic = ((counts - expected)[on] ** 2 / expected[on]).sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees), (statistic, degrees)


def test_no_logprobs_unless_asked() -> None:
    got, _ = sample(np.zeros((2, 5)), table(2))
    assert got.logprob.isnan().all() and got.top_token.shape == (2, 0)


def test_top_p_of_one_keeps_what_weighs_nothing_beside_a_row_that_has_one() -> None:
    # Too rarely drawn to show in tokens.
    x = torch.tensor([[0.0, -1.0, -60.0, -torch.inf]] * 2, dtype=torch.float64)
    params = RowParams.build(table(2, top_p=[1.0, 0.9999]), np.arange(2), np.full(2, SAMPLE))
    (keep,) = ThreadWorld(1).run(
        lambda world: Sampler(world.collectives, 0, 4)._kept(x, params, {"best": x.amax(1)[None]})
    )
    assert keep[:, :3].tolist() == [[True, True, True], [True, True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordered_keys(dtype: torch.dtype) -> None:
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x = torch.tensor([-torch.inf, -huge, -1.5, -1.0, -tiny, -tiny / 4, 0.0, tiny / 4, tiny, 2.0, huge], dtype=dtype)
    keys = ordered_keys(x)
    assert (keys.diff() > 0).all()
    assert ordered_keys(torch.tensor([-0.0], dtype=dtype)) == keys[6]


def test_top_of_shard_with_ties() -> None:
    x = torch.from_numpy(np.random.default_rng(4).integers(0, 6, (300, 40)).astype(np.float64))
    for k in (1, 7, 40):
        values, columns = top_of_shard(x, k)
        want = np.argsort(-x.numpy(), axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(columns.numpy(), want)
        assert torch.equal(values, x.gather(1, columns))
