"""A generation request and its results, as plain values that are sent between processes."""

from __future__ import annotations

import enum
import hashlib
import math
import re

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_IDS = 256
MAX_TOKEN_ID = (1 << 31) - 1
MAX_LOGIT_BIAS = 300  # entries, as OpenAI allows
MAX_GRAMMAR_BYTES = 64 << 10
MAX_PRIORITY = 1 << 31  # the scheduler keeps priorities, and their negatives, in 64 bits
_SURROGATES = re.compile("[\ud800-\udfff]")  # cannot be encoded in UTF-8, in which requests are sent


class FinishReason(str, enum.Enum):
    STOP = "stop"  # an end-of-text id or one of stop_token_ids
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    ERROR = "error"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(ok: bool, field: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}: {value!r} is not allowed; it must be {allowed}")


class GrammarKind(str, enum.Enum):
    JSON_OBJECT = "json_object"  # any JSON object; the text stays empty
    JSON_SCHEMA = "json_schema"  # a JSON Schema; its only white space is one blank after a comma or colon, or none
    REGEX = "regex"  # matches the whole output; Rust's syntax, without look-around and back-references
    LARK = "grammar"  # llguidance's dialect of Lark, whose rules begin at `start`


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grammar that the output must match. Whether `text` compiles is checked when the request is added."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        kinds = ", ".join(kind.value for kind in GrammarKind)
        _check(isinstance(self.kind, GrammarKind), "grammar.kind", self.kind, f"one of {kinds}")
        _check(isinstance(self.text, str), "grammar.text", self.text, "text")
        _check(not _SURROGATES.search(self.text), "grammar.text", self.text[:80], "text without lone surrogates")
        size = len(self.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar.text: {size} bytes are too many; it must be at most {MAX_GRAMMAR_BYTES} bytes")
        ok = bool(self.text) == (self.kind is not GrammarKind.JSON_OBJECT)
        _check(ok, "grammar.text", self.text[:80], f"empty for {GrammarKind.JSON_OBJECT.value}, and not for the others")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Wrong values raise ValueError naming the field.

    In vLLM's order (v1/sample/sampler.py): the grammar's mask; min_tokens; logit_bias; repetition, frequency and
    presence penalty; then temperature 0 takes the likeliest token, or the filters apply to the tempered distribution:
    min_p and top_k each against the whole vocabulary, then top_p over what they leave; tokens that tie at a threshold
    stay together. Reported log-probabilities are those of the model, before all of this.

    Definitions: temperature, top_p, presence_penalty, frequency_penalty and logit_bias are OpenAI's; repetition_penalty
    is that of "CTRL" (Keskar et al. 2019), as in transformers and vLLM; top_k, min_p, min_tokens, stop_token_ids,
    ignore_eos and prompt_logprobs are vLLM's.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    """Until so many tokens are generated, end-of-text ids (even with ignore_eos) and stop_token_ids are not chosen,
    unless the grammar allows nothing else."""
    temperature: float = 1.0
    presence_penalty: float = 0.0
    """Subtracted from the logit of each id that is in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted from an id's logit as many times as it is in the output so far."""
    repetition_penalty: float = 1.0
    """Logits of ids in the prompt or the output so far are divided by it if positive, and multiplied by it if not."""
    logit_bias: dict[int, float] = {}
    """{token id: what is added to its logit}. (msgspec gives each instance a dict of its own.)"""
    grammar: Grammar | None = None
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: derived from the request's id
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report beside each chosen token; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def __post_init__(self) -> None:
        ok = _whole(self.max_tokens) and self.max_tokens >= 1
        _check(ok, "max_tokens", self.max_tokens, "a whole number, at least 1")
        ok = _whole(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        _check(ok, "min_tokens", self.min_tokens, f"a whole number from 0 to max_tokens, which is {self.max_tokens}")
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            number = getattr(self, field)
            ok = isinstance(number, int | float) and math.isfinite(number)
            _check(ok, field, number, "a finite number")
        _check(0 <= self.temperature <= 100, "temperature", self.temperature, "a number from 0 to 100")
        ok = _whole(self.top_k) and self.top_k >= 0
        _check(ok, "top_k", self.top_k, "0 (off) or a positive whole number")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        for field in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, field) <= 2, field, getattr(self, field), "a number from -2 to 2")
        ok = 0.01 <= self.repetition_penalty <= 100
        _check(ok, "repetition_penalty", self.repetition_penalty, "a number from 0.01 to 100; 1 is off")
        self._check_logit_bias()
        seed_ok = self.seed is None or (_whole(self.seed) and 0 <= self.seed < 1 << 63)
        _check(seed_ok, "seed", self.seed, "a whole number from 0 to 2**63 - 1")
        stops = self.stop_token_ids
        stop_ok = isinstance(stops, tuple | list) and all(_whole(i) and 0 <= i <= MAX_TOKEN_ID for i in stops)
        allowed = f"a tuple of at most {MAX_STOP_IDS} ids from 0 to {MAX_TOKEN_ID}"
        _check(stop_ok and len(stops) <= MAX_STOP_IDS, "stop_token_ids", stops, allowed)
        for field, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            ok = value is None or (_whole(value) and 0 <= value <= MAX_LOGPROBS)
            _check(ok, field, value, f"a whole number from 0 to {MAX_LOGPROBS}")
        ok = self.grammar is None or isinstance(self.grammar, Grammar)
        _check(ok, "grammar", self.grammar, "a Grammar or None")
        ok = self.grammar is None or not self.ignore_eos
        _check(ok, "ignore_eos", self.ignore_eos, "False beside a grammar, which says where the text ends")

    @property
    def penalised(self) -> bool:
        """Whether ids seen before become less likely, or more."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def controlled(self) -> bool:
        """Whether logits are changed before tokens are chosen."""
        return self.penalised or self.min_tokens > 0 or bool(self.logit_bias) or self.grammar is not None

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        _check(isinstance(bias, dict), "logit_bias", bias, "a dict of token ids and biases")
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias: {len(bias)} entries are too many; it must be at most {MAX_LOGIT_BIAS}")
        for token, value in bias.items():
            ok = _whole(token) and 0 <= token <= MAX_TOKEN_ID
            _check(ok, "logit_bias", token, f"token ids from 0 to {MAX_TOKEN_ID}")
            ok = isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
            _check(ok, "logit_bias", {token: value}, "biases from -100 to 100")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `id` is unique among requests that have not ended, and breaks ties between requests."""

    id: str
    prompt: tuple[int, ...]  # token ids
    sampling: SamplingParams
    priority: int = 0  # higher goes first
    deadline_s: float | None = None  # seconds from arrival after which the request is cancelled

    def __post_init__(self) -> None:
        ok = self.deadline_s is None or self.deadline_s > 0
        _check(ok, "deadline_s", self.deadline_s, "a positive number of seconds")
        ok = -MAX_PRIORITY <= self.priority <= MAX_PRIORITY
        _check(ok, "priority", self.priority, f"from {-MAX_PRIORITY} to {MAX_PRIORITY}")

    @property
    def seed(self) -> int:
        """The seed of this request's sampling noise: the user's, or one that depends only on the id."""
        if self.sampling.seed is not None:
            return self.sampling.seed
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "little") >> 1

    def check(self, vocab_size: int, max_context: int) -> None:
        """Raises ValueError if a model with this vocabulary and context cannot take the request."""
        _check(len(self.prompt) >= 1, "prompt", "[]", "at least one token")
        prompt = self.prompt
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:  # faster than one by one
            bad = [i for i in prompt if not (_whole(i) and 0 <= i < vocab_size)]
            _check(not bad, "prompt", bad[0] if bad else None, f"token ids from 0 to {vocab_size - 1}")
        beyond = next((i for i in self.sampling.logit_bias if i >= vocab_size), None)
        _check(beyond is None, "logit_bias", beyond, f"token ids from 0 to {vocab_size - 1}")
        room = f"at most {max_context - 1} tokens, so that one more fits the context of {max_context}"
        if len(self.prompt) >= max_context:
            raise ValueError(f"prompt: {len(self.prompt)} tokens are too many; it must be {room}")


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token's natural-log probability by the model (before temperature and filters), and those of the likeliest
    tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), best first


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """What one step adds to one request."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    queued_s: float | None = None
    """With the first token only: seconds that the request waited until it was first given cache."""


class Completion(msgspec.Struct, frozen=True):
    """A finished request, as LLM.generate returns it."""

    request_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # for prompt[1:]
    error: str | None = None
