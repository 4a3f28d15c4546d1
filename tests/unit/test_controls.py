"""Penalties, bias, min_tokens and grammars over shards, against whole rows in numpy, transformers and formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from transformers import RepetitionPenaltyLogitsProcessor

from splash_trt.dist.world import ThreadWorld, World
from splash_trt.plan import SAMPLE, Plan
from splash_trt.request import Grammar, GrammarKind
from splash_trt.runtime.controls import Controls
from splash_trt.runtime.grammar import GrammarCompiler
from splash_trt.runtime.penalties import Share
from splash_trt.runtime.sampler import RowParams, Sampler
from tests.unit.controls_cases import END, SLOTS, Slot, adjust, plan_of, write_tokenizer
from tests.unit.test_sampler import cut, log_softmax, reference, table

PENALTIES = ((1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 1.5), (1.8, -0.4, 0.3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("bytes"), 257)


class Rank:
    """One shard's sampler and controls."""

    def __init__(self, world: World, widths: Sequence[int], compiler: GrammarCompiler | str) -> None:
        first = sum(widths[: world.rank])
        self.share = Share(first, widths[world.rank])
        self.sampler = Sampler(world.collectives, first, sum(widths))
        self.controls = Controls(self.share, SLOTS, (END,), compiler)

    def step(
        self,
        whole: torch.Tensor,
        plan: Plan,
        rows: np.ndarray,
        slot: np.ndarray,
        position: np.ndarray,
        target: np.ndarray,
    ) -> tuple[list[int], list[float], dict[int, str]]:
        """whole [W, V of all ranks]."""
        self.controls.apply(plan)
        adjustment = self.controls.adjustment(slot, position, target)
        shard = whole[:, self.share.first_id : self.share.first_id + self.share.width].contiguous()
        found = self.sampler(shard, RowParams.build(rows, position, target), adjustment)
        chosen = np.flatnonzero(target == SAMPLE)
        self.controls.remember(slot[chosen], found.tokens[chosen])
        return found.tokens.tolist(), found.logprob.tolist(), adjustment.errors if adjustment else {}


def random_slot(rng: np.random.Generator, vocab_size: int) -> Slot:
    """Any mixture of controls, or none."""

    def ids(n: int) -> list[int]:
        return rng.integers(1, vocab_size, n).tolist()

    state = Slot(prompt=ids(int(rng.integers(1, 40))))
    if rng.random() < 0.6:
        state.penalties = PENALTIES[int(rng.integers(len(PENALTIES)))]
    if rng.random() < 0.4:
        state.bias = {token: float(rng.uniform(-100, 100)) for token in ids(5)}
    if rng.random() < 0.4:
        state.min_tokens, state.stops = int(rng.integers(1, 9)), tuple(ids(20))
    if rng.random() < 0.4:
        state.grammar = Grammar(GrammarKind.REGEX, str(rng.choice(["[a-f]{3,12}", "(foo|bar)+[0-9]*", ".*x", "ab?c"])))
    return state


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 7, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_tokens_over_shards(folder: Path, filters: dict[str, float]) -> None:
    """10 steps of requests that come and go, on 1 to 4 ranks, each against the reference and so against each other."""
    vocab_size = 300  # more than the tokenizer knows
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=[END])
    for widths in ([300], cut(300, 2, False), cut(300, 3, True), cut(300, 4, False)):

        def program(world: World, widths: Sequence[int] = widths) -> int:
            rank = Rank(world, widths, GrammarCompiler(folder, vocab_size, (END,)))
            return check_steps(rank, tokenizer, vocab_size, filters)

        assert min(ThreadWorld(len(widths)).run(program)) > 80


def check_steps(rank: Rank, tokenizer: LLTokenizer, vocab_size: int, filters: dict[str, float]) -> int:
    """The number of tokens chosen."""
    rng = np.random.default_rng(3)
    slots: dict[int, Slot] = {}
    chosen = 0
    for _ in range(10):
        ended = [s for s, state in slots.items() if len(state.output) > 9 or state.output[-1:] == [END]]
        for slot in ended:
            del slots[slot]
        opened = [slot for slot in range(SLOTS) if slot not in slots and rng.random() < 0.7]
        slots |= {slot: random_slot(rng, 257) for slot in opened}
        preempted = rng.choice(sorted(slots), 3, replace=False).tolist()
        order = rng.permutation(sorted(slots))
        target = np.where(rng.random(len(order)) < 0.2, rng.integers(0, vocab_size, len(order)), SAMPLE)
        position = np.array([len(slots[s].prompt) + len(slots[s].output) for s in order])
        x = rng.normal(size=(len(order), vocab_size)) * 4
        rows = table(len(order), logprobs=0, seed=order, **filters)
        plan = plan_of(slots, sorted({*opened, *preempted}))
        tokens, logprobs, errors = rank.step(torch.from_numpy(x), plan, rows, order, position, target)
        assert not errors
        for i, slot in enumerate(order.tolist()):
            state = slots[slot]
            if target[i] != SAMPLE:
                assert tokens[i] == target[i]
                continue
            want = reference(state.adjusted(x[i], tokenizer), rows[i], int(position[i]))
            assert tokens[i] == want, (slot, state)
            assert logprobs[i] == pytest.approx(log_softmax(x)[i, want], abs=1e-11)  # of the unfiltered distribution
            state.output.append(want)
            chosen += 1
    return chosen


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float, dtype: type) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=64).astype(dtype)
    state = Slot(prompt=rng.integers(0, 64, 15).tolist(), output=rng.integers(0, 64, 9).tolist())
    state.penalties = (penalty, 0, 0)
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    want = oracle(torch.tensor([state.prompt + state.output]), torch.from_numpy(x)[None].clone())[0].numpy()
    assert (want != x).sum() > 10
    np.testing.assert_array_equal(adjust(state, x), want)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, in OpenAI's documentation."""
    state = Slot(prompt=[1, 1, 2], output=[4, 2, 4, 4], penalties=(1.0, 0.5, 0.25))
    x = np.zeros(6)
    assert adjust(state, x).tolist() == [0, 0, -0.75, 0, -1.75, 0]


def test_bias_and_min_tokens() -> None:
    x = np.array([5.0, 1.0, 2.0, 3.0])
    bound = Slot(prompt=[1], output=[2], min_tokens=2, stops=(3, 10**6), bias={1: 2.5, 3: 100.0})
    assert adjust(bound, x).tolist() == [-np.inf, 3.5, 2, -np.inf]
    bound.output.append(2)
    assert adjust(bound, x).tolist() == [5, 3.5, 2, 103]


def test_what_ends_is_forgotten_and_a_slot_begins_anew() -> None:
    controls = Controls(Share(0, 8), SLOTS, (END,), "none")
    one, sample = np.array([5]), np.array([SAMPLE])
    controls.apply(plan_of({5: Slot([1], [2], penalties=(1.0, 0.0, 1.0))}, [5]))
    assert controls.adjustment(one, one, sample) is not None
    assert controls.adjustment(one, one, np.array([3])) is None, "nothing is chosen there"
    controls.apply(plan_of({5: Slot([1])}, []))  # it is over; what takes its slot later uses no control
    assert controls.adjustment(one, one, sample) is None and not controls._slots
    controls.apply(plan_of({5: Slot([1], [3], penalties=(1.0, 0.0, 1.0))}, [5]))
    adjustment = controls.adjustment(one, one, sample)
    assert adjustment is not None and adjustment(torch.zeros(1, 8)).tolist() == [[0, 0, 0, -1, 0, 0, 0, 0]]


def test_memory_is_for_those_at_once() -> None:
    controls = Controls(Share(0, 8), SLOTS, (END,), "none")
    for turn in range(50):
        slots = {(turn + i) % SLOTS: Slot([1], penalties=(1.1, 0.0, 0.0)) for i in range(10)}
        controls.apply(plan_of(slots, sorted(slots)))
    assert len(controls._penalties._output) == 16
