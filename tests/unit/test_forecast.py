"""What requests still have before them, and how fast they come."""

from __future__ import annotations

import numpy as np
import pytest

from splash_trt.scheduler.forecast import PRIOR_WEIGHT, Arrivals, Arriving, Lengths


def told(*ended: int) -> Lengths:
    lengths = Lengths(first_guess=100)
    for length in ended:
        lengths.ended(length, 100)
    return lengths


def test_without_any_a_request_lasts_as_long_again() -> None:
    assert told().left(np.array([0, 50, 400])).tolist() == [100, 100, 400]


def test_the_mean_residual_life() -> None:
    lengths = told(*[10] * 50, *[1000] * 50)
    left = lengths.left(np.array([0, 20]))
    assert left[0] == pytest.approx((50 * 10 + 50 * 1000 + PRIOR_WEIGHT * 100) / (100 + PRIOR_WEIGHT))
    assert left[1] == pytest.approx((50 * 980 + PRIOR_WEIGHT * 100) / (50 + PRIOR_WEIGHT))


def test_one_that_outlives_all_others_falls_back_to_the_rule() -> None:
    assert told(*[10] * 200).left(np.array([5000]))[0] == 5000


def test_exponential_lengths_are_memoryless() -> None:
    rng = np.random.default_rng(0)
    lengths = told(*rng.exponential(300, 500).astype(int).tolist())
    left = lengths.left(np.array([0, 150, 300]))
    assert (np.abs(left - 300) < 60).all()


def test_the_latest_lengths_count() -> None:
    lengths = told(*[1000] * 600, *[10] * 600)
    assert lengths.mean(np.array([100])) < 12


def test_documents_get_other_answers_than_questions() -> None:
    lengths = Lengths(first_guess=100)
    for _ in range(50):
        lengths.ended(1000, 200)
        lengths.ended(30, 40_000)
    left = lengths.left(np.array([0, 0, 0]), np.array([180, 50_000, 5]))
    assert left[0] > 900 and left[1] < 40
    assert left[2] == pytest.approx(lengths.left(np.zeros(1))[0]), "of none like it: as of all"
    assert lengths.mean(np.array([40_000])) < 40 < lengths.mean(np.zeros(0, np.int64))


def test_arrivals() -> None:
    arrivals = Arrivals()
    assert arrivals.rates(5.0) == Arriving(0, 0, (), 0)
    for i in range(400):
        arrivals.add(i / 4, 100)
    found = arrivals.rates(99.9)
    assert found.per_s == pytest.approx(4, rel=0.05) and found.tokens_s == pytest.approx(400, rel=0.05)
    assert found.prompts == ((1.0, 100.0),) and found.most_tokens == pytest.approx(100 * 400, rel=0.05)
    assert arrivals.rates(500.0).per_s == 0
    for i in range(80):
        arrivals.add(500 + i / 4, 100)
    assert arrivals.rates(519.9).most_tokens == pytest.approx(20 * 400, rel=0.05), "what came before the gap is over"


@pytest.mark.parametrize("tokens", [1 << 38, 1 << 39, 1 << 62])
def test_arrivals_longer_than_any_context(tokens: int) -> None:
    arrivals = Arrivals()
    arrivals.add(1.0, tokens)
    assert arrivals.rates(2.0).prompts == ((1.0, tokens),)


def test_silence_ends_what_used_to_come() -> None:
    arrivals = Arrivals()
    for i in range(40):
        arrivals.add(i / 2, 30_000 if i % 4 == 0 else 300)
    before, after = arrivals.rates(20.0), arrivals.rates(29.0)
    assert after.per_s < before.per_s / 20
    short = [found.tokens_s * found.prompts[0][0] for found in (before, after)]
    assert short[1] < short[0] / 50, "by the gaps that they used to leave"
    for i in range(40, 60):
        arrivals.add(i / 2, 300)
    now = arrivals.rates(30.0)
    assert now.per_s > before.per_s / 2, "short ones still come"
    assert now.tokens_s < before.tokens_s / 2, "the long ones do not"
    assert now.tokens_s > now.per_s * 200, "that the long ones ended says nothing of the short ones"


def test_a_document_that_comes_with_a_crowd_counts_as_any_other() -> None:
    alone, among = Arrivals(), Arrivals()
    for arrivals, crowd in ((alone, 0), (among, 500)):
        for now in range(0, 31, 3):
            arrivals.add(float(now), 30_000)
        for _ in range(crowd):
            arrivals.add(30.0, 300)
    found, expected = among.rates(31.0), alone.rates(31.0)
    assert expected.tokens_s == pytest.approx(10_000, rel=0.1)
    assert found.tokens_s == pytest.approx(expected.tokens_s, rel=0.01)
    assert found.per_s < expected.per_s + 0.1, "and the crowd as one request"


def test_a_burst_is_no_rate() -> None:
    arrivals = Arrivals()
    for i in range(1000):
        arrivals.add(100.99 + i / 10_000, 500)
    assert arrivals.rates(102.0).per_s == pytest.approx(2 / 10), "one in each of its seconds"
    for i in range(20):
        arrivals.add(103.0 + i, 30_000 if i % 10 == 0 else 300)
    found = arrivals.rates(123.0)
    assert found.per_s == pytest.approx(20 / 21, rel=0.2)
    assert found.prompts[-1][1] > 25_000, "a token's prompt, not a request's"
