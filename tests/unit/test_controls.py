"""Penalties, bias, min_tokens and grammars over shards, against whole rows in numpy, transformers and formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import RepetitionPenaltyLogitsProcessor

from splash_trt.config import Layout
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.plan import SAMPLE, SAMPLING_DTYPE, Plan, SlotControls, encode_controls
from splash_trt.request import Grammar, GrammarKind
from splash_trt.runtime.controls import Controls
from splash_trt.runtime.grammar import GrammarCompiler
from splash_trt.runtime.penalties import Share
from splash_trt.runtime.sampler import RowParams, Sampler
from tests.unit.test_sampler import cut, log_softmax, reference, table

END = 0
SLOTS = 16
PENALTIES = ((1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 1.5), (1.8, -0.4, 0.3))


def write_tokenizer(folder: Path, vocab_size: int, end: int = END) -> Path:
    """tokenizer.json of bytes, printable ones first, and one end-of-text token; vocab_size ids, of at most 257."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 1]
    names.insert(end, "<end>")
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("bytes"), 257)


@dataclass
class Slot:
    """A request as the reference sees it: all its tokens, and what it asked for."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    penalties: tuple[float, float, float] | None = None
    bias: dict[int, float] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def controlled(self) -> bool:
        return bool(self.penalties or self.bias or self.min_tokens or self.grammar)

    def told(self, slot: int) -> SlotControls:
        return SlotControls(
            slot=slot,
            prompt=np.array(self.prompt, np.int32).tobytes(),
            output=np.array(self.output, np.int32).tobytes(),
            penalties=self.penalties,
            logit_bias=self.bias,
            stop_token_ids=self.stops,
            free_from=len(self.prompt) + self.min_tokens,
            grammar=self.grammar,
        )

    def adjusted(self, x: np.ndarray, tokenizer: LLTokenizer | None) -> np.ndarray:
        """In vLLM's order, id by id."""
        x, ends = x.copy(), {END, *self.stops}
        allowed = np.ones(len(x), np.bool_)
        if self.grammar is not None:
            assert tokenizer is not None and self.grammar.kind is GrammarKind.REGEX
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(self.grammar.text), log_level=0)
            assert matcher.consume_tokens(self.output)
            allowed[:] = False
            mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
            allowed[: len(mask)] = mask[: len(x)]
        without_ends = allowed.copy()
        without_ends[list(ends)] = False
        if len(self.output) < self.min_tokens and without_ends.any():
            allowed = without_ends
        x[~allowed] = -np.inf
        for token, value in self.bias.items():
            x[token] += value
        repetition, frequency, presence = self.penalties or (1.0, 0.0, 0.0)
        for token in {*self.prompt, *self.output}:
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        for token in set(self.output):
            x[token] -= frequency * self.output.count(token) + presence
        return x


def plan_of(slots: dict[int, Slot], opened: Sequence[int]) -> Plan:
    sampling = np.zeros(len(opened), SAMPLING_DTYPE)
    sampling["slot"] = opened
    empty = np.zeros(0, np.int32)
    controlled = sorted(slot for slot, state in slots.items() if state.controlled)
    return Plan(
        step=1,
        epoch=0,
        layout=Layout.TP,
        **dict.fromkeys(("slot", "start", "count", "home", "want_index"), empty),
        absorbed=empty.astype(np.bool_),
        token=empty.astype(np.int64),
        want_target=empty.astype(np.int64),
        counts=empty,
        bucket=0,
        sampling=sampling,
        controls=encode_controls([slots[slot].told(slot) for slot in opened if slots[slot].controlled]),
        controlled=np.array(controlled, np.int32),
    )


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


def adjust(state: Slot, x: np.ndarray, compiler: GrammarCompiler | str = "none") -> np.ndarray:
    """x [V] as a rank of its own makes it; where its output ends."""
    controls = Controls(Share(0, len(x)), SLOTS, (END,), compiler)
    controls.apply(plan_of({3: state}, [3]))
    position = np.array([len(state.prompt) + len(state.output)])
    adjustment = controls.adjustment(np.array([3]), position, np.array([SAMPLE]))
    assert adjustment is not None
    return adjustment(torch.from_numpy(x)[None])[0].numpy()


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


def test_min_tokens_yield_to_a_grammar_that_has_ended(folder: Path) -> None:
    compiler, x = GrammarCompiler(folder, 257, (END,)), np.zeros(257)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids
    state = Slot(prompt=[1], output=ids[:1], min_tokens=9, grammar=Grammar(GrammarKind.REGEX, "ab?"))
    assert np.flatnonzero(adjust(state, x, compiler) == 0).tolist() == ids[1:], "it may end here, were it not bound"
    state.output = ids
    assert np.flatnonzero(adjust(state, x, compiler) == 0).tolist() == [END]


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


def errors_of(compiler: GrammarCompiler | str, state: Slot) -> dict[int, str]:
    controls = Controls(Share(0, 257), SLOTS, (END,), compiler)
    controls.apply(plan_of({2: state}, [2]))
    where = np.array([2]), np.array([len(state.prompt) + len(state.output)]), np.array([SAMPLE])
    adjustment = controls.adjustment(*where)
    assert adjustment is not None
    adjustment(torch.zeros(1, 257))
    return adjustment.errors


def test_a_grammar_that_the_vocabulary_cannot_continue(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = letters.index("b") + 1  # ids to a, but not b
    compiler = GrammarCompiler(write_tokenizer(tmp_path, size), size, (END,))
    grammar = Grammar(GrammarKind.REGEX, "ab")
    assert errors_of(compiler, Slot([1], grammar=grammar)) == {}
    errors = errors_of(compiler, Slot([1], [letters.index("a") + 1], grammar=grammar))
    assert errors == {0: "grammar: nothing in the model's vocabulary can continue it"}
    with pytest.raises(ValueError, match="has no first token"):
        compiler.check(Grammar(GrammarKind.REGEX, "b"))


def test_a_grammar_that_grows_past_the_limits_ends_with_an_error(folder: Path) -> None:
    compiler = GrammarCompiler(folder, 257, (END,))
    grammar = Grammar(GrammarKind.LARK, 'start: e\ne: e e | "a" | e e e | ""')
    matcher, mask = compiler.matcher(grammar), np.zeros(compiler.num_words, np.int32)
    (a,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids
    for _ in range(500):
        why = matcher.fill(mask)
        if why:
            break
        matcher.consume([a])
    assert "items" in why and mask[0] == 1 << END and not mask[1:].any()


def test_an_output_that_breaks_its_grammar_ends_with_an_error(folder: Path) -> None:
    compiler = GrammarCompiler(folder, 257, (END,))
    (error,) = errors_of(compiler, Slot([1], [40, 41], grammar=Grammar(GrammarKind.REGEX, "a"))).values()
    assert error.startswith("grammar: ")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", r"a(?=b)", "look-around"),
        ("regex", r"[^\s\S]", "no first token"),
        ("grammar", "start: foo", "unknown name"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", "[" * 60_000, "is not JSON"),
        ("json_schema", "3", "object or boolean"),
        ("json_schema", "false", "Unsatisfiable"),
        ("json_schema", '{"type": "text"}', "Invalid type"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented"),
        ("json_schema", '{"$ref": "http://example.com/x.json"}', "not fetch"),
    ],
)
def test_grammars_that_do_not_compile(folder: Path, kind: str, text: str, words: str) -> None:
    compiler, grammar = GrammarCompiler(folder, 257, (END,)), Grammar(GrammarKind(kind), text)
    with pytest.raises(ValueError, match=f"^grammar: .*{kind}.*{words}") as caught:
        compiler.check(grammar)
    assert len(str(caught.value)) < 700
    assert set(errors_of(compiler, Slot([1], grammar=grammar))) <= {0}, "unchecked, it still is no rank's end"


def test_a_large_schema(folder: Path) -> None:
    """1500 optional properties, which are as many items at once."""
    compiler = GrammarCompiler(folder, 257, (END,))
    schema = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}})
    text = '{"p3": 12, "p1499":-7}'
    matcher = compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, schema))
    for token in Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids:
        mask = np.zeros(compiler.num_words, np.int32)
        assert matcher.fill(mask) == "" and mask[token >> 5] >> (token & 31) & 1
        matcher.consume([token])
    assert matcher.fill(mask) == "" and mask[0] & 1 << END


FREE = '{"type": "object", "x-guidance": {"whitespace_flexible": true}}'


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ("", '{"a":[1,2],"b":{"c":"d"}}', True),
        ("", '{"a": [1, 2], "b": {"c": "d"}}', True),
        ("", '{"a": [1,2],"b": {}}', True),
        ("true", '{"a": [1, 2]}', True),
        ("", '{ "a": 1}', False),
        ("", '{"a" : 1}', False),
        ("", '{"a":  1}', False),
        ("", '{"a": 1 }', False),
        ("", '{"a":\n1}', False),
        ("", '{"a":\t1}', False),
        ("", '{"a": [1,\n  2]}', False),
        ("", '{"a": [ ]}', False),
        ("true", '{\n"a": 1}', False),
        ('{"type": "object"}', '{"a": 1,\n "b": 2}', False),
        (FREE, '{\n  "a": [ 1 ,\n2 ]\n}', True),
    ],
)
def test_white_space_in_json(folder: Path, schema: str, text: str, fits: bool) -> None:
    """A blank after a comma or colon, or none, and no other, unless the schema says so."""
    kind = GrammarKind.JSON_SCHEMA if schema else GrammarKind.JSON_OBJECT
    matcher = GrammarCompiler(folder, 257, (END,)).matcher(Grammar(kind, schema))
    matcher.consume(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
    assert (matcher.error == "") == fits
    mask = np.zeros(257 // 32 + 1, np.int32)
    assert (matcher.fill(mask) == "" and bool(mask[0] & 1 << END)) == fits


def test_a_deployment_without_a_vocabulary(tmp_path: Path, folder: Path) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    assert errors_of("grammar: no tokenizer.json", Slot([1], grammar=grammar)) == {0: "grammar: no tokenizer.json"}
    with pytest.raises(ValueError, match="grammar: .*tokenizer.json"):
        GrammarCompiler(tmp_path, 257, (END,))
    with pytest.raises(ValueError, match="no end-of-text id"):
        GrammarCompiler(folder, 257, ())
    for text in ("{}", "no JSON", "[]"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match="grammar: .*tokenizer.json is of no use"):
            GrammarCompiler(tmp_path, 257, (END,))


@pytest.mark.parametrize("vocab_size", [200, 257, 400])
def test_a_model_has_more_or_fewer_ids_than_its_tokenizer(folder: Path, vocab_size: int) -> None:
    compiler = GrammarCompiler(folder, vocab_size, (END,))
    (a,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids
    x = adjust(Slot([1], grammar=Grammar(GrammarKind.REGEX, "a+")), np.zeros(vocab_size), compiler)
    assert np.flatnonzero(x == 0).tolist() == [a]
