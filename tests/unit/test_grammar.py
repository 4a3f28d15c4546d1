"""Grammars: what they allow, what does not compile, and what ends with an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from splash_trt.plan import SAMPLE
from splash_trt.request import Grammar, GrammarKind
from splash_trt.runtime.controls import Controls
from splash_trt.runtime.grammar import GrammarCompiler
from splash_trt.runtime.penalties import Share
from tests.unit.controls_cases import END, SLOTS, Slot, adjust, plan_of, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("bytes"), 257)


def test_min_tokens_yield_to_a_grammar_that_has_ended(folder: Path) -> None:
    compiler, x = GrammarCompiler(folder, 257, (END,)), np.zeros(257)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids
    state = Slot(prompt=[1], output=ids[:1], min_tokens=9, grammar=Grammar(GrammarKind.REGEX, "ab?"))
    assert np.flatnonzero(adjust(state, x, compiler) == 0).tolist() == ids[1:], "it may end here, were it not bound"
    state.output = ids
    assert np.flatnonzero(adjust(state, x, compiler) == 0).tolist() == [END]


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
