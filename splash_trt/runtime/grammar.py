"""Grammars that an output has to follow: compiled by llguidance, and advanced with each token on every rank alike.

Nothing here imports torch, so that a frontend can check a grammar before it sends the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from splash_trt.request import Grammar, GrammarKind

# MAX_GRAMMAR_BYTES bounds compilation: the worst of 64 KB that was found, 2000 optional properties, took 0.4 s on a
# vocabulary of 128,000. What a step may cost is bounded by llguidance's own limits and these. By its own alone an
# ambiguous grammar took up to 0.4 s a token, and was stopped at 10 ms with 500 items; schemas need more, four items
# for each optional property, and cannot be as ambiguous.
MAX_ITEMS_IN_ROW = {GrammarKind.JSON_SCHEMA: 12_000, GrammarKind.LARK: 500}
OWN_MAX_ITEMS_IN_ROW = 2000
MAX_LEXER_STATES = 25_000  # of 1 to 2 KB each
MAX_WHY = 500  # characters of an explanation; the library repeats the grammar in it

# Regular expressions; there is no other white space between JSON's tokens. JSON allows any amount anywhere, and a model
# that has been led astray there writes it up to max_tokens.
COMMA, COLON = ", ?", ": ?"

NOTHING_FOLLOWS = "nothing in the model's vocabulary can continue it"


class Matcher:
    """Where one output stands in its grammar.

    An output that breaks the grammar, or a limit of the library, leaves a matcher that allows end-of-text only and
    says why. The library draws on nothing but the grammar and the tokens, so every rank's matcher says the same; none
    is copied from another, as copies would share what the limits count.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar) -> None:
        """ValueError if a schema is not JSON. Any other mistake in the grammar is in `error`."""
        limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW.get(grammar.kind, OWN_MAX_ITEMS_IN_ROW),
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        self._matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        self._end = tokenizer.eos_token

    @property
    def error(self) -> str:
        """Why it does not compile, or which limit it broke; empty: all is well."""
        text = " ".join(self._matcher.get_error().removesuffix("<non-verbose/>").split())
        return NOTHING_FOLLOWS if text.startswith("NoExtension") else text[:MAX_WHY]

    @property
    def ended(self) -> bool:
        """Only end-of-text can follow."""
        return self._matcher.is_stopped()

    def fill(self, mask: np.ndarray) -> str:
        """Set the bits of the ids that may follow, in mask [words] int32. Returns why there are none, or nothing."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask[None])
        if self._matcher.is_error():
            return self.error
        # With nothing left the library allows end-of-text where the grammar does not.
        may_end = mask[self._end >> 5] >> (self._end & 31) & 1
        return NOTHING_FOLLOWS if may_end and not self._matcher.is_accepting() else ""

    def consume(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))


class GrammarCompiler:
    """Makes matchers for one vocabulary.

    tokenizer: a folder with tokenizer.json, or what that file holds. ValueError if the file is missing or of no use, or
    the model has no end-of-text id.
    """

    def __init__(self, tokenizer: Path | bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        path = (tokenizer if isinstance(tokenizer, Path) else Path()) / "tokenizer.json"
        if not eos_token_ids:
            raise ValueError("grammar: the model has no end-of-text id, so no output could end; set eos_token_id")
        try:
            text = (tokenizer if isinstance(tokenizer, bytes) else path.read_bytes()).decode()
            own_size = _own_size(text)
            self._tokenizer = LLTokenizer(text, n_vocab=max(vocab_size, own_size), eos_token=list(eos_token_ids))
        except OSError as error:
            raise ValueError(f"grammar: it needs the model's vocabulary, and {path}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"grammar: it needs the model's vocabulary, and {path} is of no use: {error}") from None
        self.num_words = -(-self._tokenizer.vocab_size // 32)
        """int32 words of a mask."""

    def matcher(self, grammar: Grammar, output: Sequence[int] = ()) -> Matcher:
        """At the end of `output`. ValueError if the grammar does not compile."""
        matcher = Matcher(self._tokenizer, grammar)
        if matcher.error:
            raise ValueError(f"grammar: this {grammar.kind.value} does not compile: {matcher.error}")
        if len(output):
            matcher.consume(output)
        return matcher

    def check(self, grammar: Grammar) -> None:
        """ValueError if the grammar does not compile, or nothing matches it."""
        matcher, mask = self.matcher(grammar), np.zeros(self.num_words, np.int32)
        why = matcher.fill(mask)
        if why or matcher.ended:
            raise ValueError(f"grammar: this {grammar.kind.value} has no first token: {why or NOTHING_FOLLOWS}")


def _own_size(tokenizer: str) -> int:
    """Ids that a tokenizer.json speaks of. Models have more, or (padding apart) fewer, than their tokenizers."""
    content = json.loads(tokenizer)
    ids = [entry["id"] for entry in content.get("added_tokens", [])] if isinstance(content, dict) else []
    model = content.get("model") if isinstance(content, dict) else None
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max(ids, default=-1) + 1


def _source(grammar: Grammar) -> str:
    """In the library's own form. ValueError if a schema is not JSON."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = json.loads(grammar.text or '{"type": "object"}')
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            return LLMatcher.grammar_from_json_schema(json.dumps(schema))  # which has no place for options
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            defaults={"whitespace_flexible": False, "item_separator": COMMA, "key_separator": COLON},
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"grammar: this {grammar.kind.value} is not JSON: {error}") from None


def compiler_of(tokenizer: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler | str:
    """Made at the start, since reading a large vocabulary takes a second that no step has; or why there is none."""
    if tokenizer is None:
        return "grammar: this deployment has no tokenizer.json, whose vocabulary a grammar needs"
    try:
        return GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    except ValueError as error:
        return str(error)
