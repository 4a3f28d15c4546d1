"""Makes the engine's Request of a checked body and a prompt."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.protocol import CompletionBody, GenerationBody
from splash_trt.link import Ready
from splash_trt.request import Grammar, Request, SamplingParams

DEFAULT_MAX_TOKENS = 16
"""For completions; a chat may use the rest of the context."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a request's fields: those of generation_config.json that vLLM takes. None: not given there."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def load(cls, path: Path) -> Defaults:
        """The defaults in a file; none without it. Raises ValueError for a value of the wrong type or range."""
        if not path.exists():
            return cls()
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            defaults = msgspec.convert(fields, cls)
            SamplingParams(**defaults.sampling(), max_tokens=defaults.max_new_tokens or 1)
        except ValueError as error:
            message = f"generation_config: {path}: {error}; mend it, or use --generation-config none"
            raise ValueError(message) from None
        return defaults

    def sampling(self) -> dict[str, Any]:
        """Those that are given, as fields of SamplingParams."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "max_new_tokens"}
        return {name: value for name, value in fields.items() if value is not None}


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of n choices. The first has the user's, so that its answer does not depend on n."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def max_tokens(body: GenerationBody, default: int | None, room: int) -> int:
    """The most output tokens. room: what the context leaves, and the default if `default` is None. Raises ApiError if
    the body asks for more than that."""
    for field in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, field, None)
        if value is not None:
            if value > room:
                message = f"{field}: {value} is not allowed; the context leaves room for {room} after this prompt"
                raise ApiError(message, param=field)
            return max(1, value)  # the engine does not take 0, which asks for the echoed prompt only
    return room if default is None else min(default, room)


def sampling_of(
    body: GenerationBody,
    defaults: Defaults,
    grammar: Grammar | None,
    ready: Ready,
    room: int,
    default_max_tokens: int | None,
) -> SamplingParams:
    """The sampling parameters. room: tokens that the context leaves after the prompt. Raises ApiError if a value is out
    of range."""
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": _top_k(body.top_k, ready.vocab_size),
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
    }
    logprobs = body.num_logprobs()
    of_prompt = [n for n in (body.prompt_logprobs, logprobs if _echoes(body) else None) if n is not None]
    if defaults.max_new_tokens is not None:
        default_max_tokens = defaults.max_new_tokens
    try:
        return SamplingParams(
            max_tokens=max_tokens(body, default_max_tokens, room),
            stop_token_ids=_known_ids(body.stop_token_ids or [], "stop_token_ids", ready.vocab_size),
            logit_bias=_logit_bias(body.logit_bias or {}, ready.vocab_size),
            logprobs=logprobs,
            prompt_logprobs=max(of_prompt, default=None),
            grammar=grammar,
            seed=body.seed,
            **{**defaults.sampling(), **{name: value for name, value in given.items() if value is not None}},
        )
    except ValueError as error:
        raise ApiError.of(error) from None


def request_of(request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, ready: Ready) -> Request:
    """The engine's request. Raises ApiError if the model cannot take the prompt."""
    try:
        request = Request(id=request_id, prompt=prompt, sampling=sampling)
        request.check(ready.vocab_size, ready.max_context)
    except ValueError as error:
        raise ApiError.of(error) from None
    return request


def _echoes(body: GenerationBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def _top_k(top_k: int | None, vocab_size: int) -> int | None:
    # A number from the vocabulary's size on means "off", as 0 does; large ones do not fit the messages to the engine.
    return top_k if top_k is None or 0 <= top_k < vocab_size else 0


def _known_ids(ids: list[int], field: str, vocab_size: int) -> tuple[int, ...]:
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ApiError(f"{field}: {bad} is not allowed; ids must be from 0 to {vocab_size - 1}", param=field)
    return tuple(ids)


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    bad = next((key for key in bias if not (key.isascii() and key.isdecimal() and len(key) <= 10)), None)
    if bad is not None:
        raise ApiError(f"logit_bias: {bad[:40]!r} is not allowed; keys must be token ids", param="logit_bias")
    known = {int(key): value for key, value in bias.items()}
    _known_ids(list(known), "logit_bias", vocab_size)
    return known
