"""What the demo model writes at temperature 1 when it has to follow a grammar, as others read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex
from tokenizers import Tokenizer

from splash_trt.llm import LLM
from splash_trt.request import FinishReason, Grammar, GrammarKind, SamplingParams

DEMO = Path(__file__).parents[2] / "models" / "splash-tiny"
SEEDS = 20
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["king", "fool", "ghost"]},
        "lines": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "alive": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
STRING = r'"([^"\\]|\\.)*"'
REGEX = r"(To be|Not to be|[A-Z][a-z]{2,7}), (thou|you) [a-z]{3,9}( [a-z]{3,9}){0,3}[.!?]"
LARK = """
start: sum
sum: product | sum "+" product
product: atom | product "*" atom
atom: /[0-9]{1,3}/ | "(" atom "-" atom ")"
"""


TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
CLOSING = {TOKENIZER.token_to_id(closing): 9.0 for closing in ('"', "}", "]")}

Outputs = dict[GrammarKind, list[tuple[str, bool]]]


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    """Of each kind SEEDS outputs, and whether they ended by themselves; all in one batch."""
    kinds: dict[Grammar, dict[str, Any]] = {
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)): {},
        # Nothing bounds an object, so it is made likely to close what it opened.
        Grammar(GrammarKind.JSON_OBJECT): {"logit_bias": CLOSING},
        Grammar(GrammarKind.REGEX, REGEX): {},
        Grammar(GrammarKind.LARK, LARK): {},
    }
    sampling = [
        SamplingParams(grammar=grammar, temperature=1.0, seed=seed, max_tokens=80, **more)
        for grammar, more in kinds.items()
        for seed in range(SEEDS)
    ]
    prompt = TOKENIZER.encode("KING HENRY:\nI say, ").ids
    with LLM(DEMO, ranks=2, layout="dop", dtype="float32", memory_bytes=64 << 20, max_running=80) as llm:
        done = llm.generate([prompt] * len(sampling), sampling)
    found: Outputs = {grammar.kind: [] for grammar in kinds}
    for completion, params in zip(done, sampling, strict=True):
        assert completion.error is None and params.grammar is not None
        ended = completion.finish is FinishReason.STOP
        found[params.grammar.kind].append((TOKENIZER.decode(completion.tokens), ended))
    return found


def test_a_schema(outputs: Outputs) -> None:
    texts = [text for text, ended in outputs[GrammarKind.JSON_SCHEMA] if ended]
    assert len(texts) >= 10 and len(set(texts)) == len(texts)
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
        # However hot the model is, it cannot spend its tokens on white space outside of strings.
        assert not regex.search(r"\s", regex.sub(r"(?<=[:,]) ", "", regex.sub(STRING, '""', text))), text


def test_any_object(outputs: Outputs) -> None:
    texts = [text for text, ended in outputs[GrammarKind.JSON_OBJECT] if ended]
    assert len(texts) > 10 and all(isinstance(json.loads(text), dict) for text in texts)


def test_a_regular_expression(outputs: Outputs) -> None:
    texts = outputs[GrammarKind.REGEX]
    assert len(set(texts)) > 10
    for text, ended in texts:
        assert ended and regex.fullmatch(REGEX, text), text


def test_a_lark_grammar(outputs: Outputs) -> None:
    texts = [text for text, ended in outputs[GrammarKind.LARK] if ended]
    assert len(texts) > 10
    for text in texts:
        assert regex.fullmatch(r"[0-9()+*-]+", text)
        eval(regex.sub(r"\b0+(?=[0-9])", "", text), {"__builtins__": {}})  # a sum, as Python reads it
