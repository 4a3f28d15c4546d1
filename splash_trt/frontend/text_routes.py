"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from splash_trt.frontend.chat import Messages, Tools, render
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.protocol import Part
from splash_trt.frontend.serving import LONG_TEXT, Serving, json_response

MAX_TOKENS = 1 << 18
"""The most tokens of a text, so that a client cannot keep the tokenizer busy for long."""


class TokenizeBody(Part, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Null: for a prompt yes, as for a completion; for messages no, as their template writes them."""
    add_generation_prompt: bool = True
    """Of messages: end with what an answer begins with."""
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("prompt: give either prompt or messages", param="prompt")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            field = "tools" if self.tools else "chat_template_kwargs"
            raise ApiError(f"{field}: goes with messages only", param=field)


class Tokenized(msgspec.Struct, frozen=True):
    """max_model_len: longest prompt + output; null before the engine has said it."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Part, frozen=True, kw_only=True):
    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


def refuse_unknown(tokens: list[int], vocab_size: int) -> None:
    """ApiError names the first id beyond the model's vocabulary."""
    bad = next((place for place, token in enumerate(tokens) if token >= vocab_size), None)
    if bad is not None:
        field = f"tokens[{bad}]"
        allowed = f"the vocabulary has {vocab_size} tokens, so ids are from 0 to {vocab_size - 1}"
        raise ApiError(f"{field}: {tokens[bad]} is not allowed; {allowed}", param=field)


class TextRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/tokenize", self._tokenize)
        router.add_post("/detokenize", self._detokenize)

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await self._serving.body(http, TokenizeBody)
        self._serving.check_model(body.model)
        body.check()
        tokenizer = self._serving.need_tokenizer("prompt" if body.messages is None else "messages")

        def encode() -> list[int]:
            text, special = body.prompt, True
            if body.messages is not None:
                switches, follows = body.chat_template_kwargs or {}, body.add_generation_prompt
                text = render(tokenizer.chat_template, body.messages, body.tools, switches, answer_follows=follows)
                special = False
            assert text is not None
            wanted = special if body.add_special_tokens is None else body.add_special_tokens
            return tokenizer.encode(text, MAX_TOKENS, wanted)

        is_short = body.prompt is not None and len(body.prompt) <= LONG_TEXT
        ids = encode() if is_short else await self._serving.background.run(encode)
        names = [tokenizer.token_name(token) for token in ids] if body.return_token_strs else None
        ready = self._serving.engine.ready
        return json_response(Tokenized(len(ids), None if ready is None else ready.max_context, ids, names))

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await self._serving.body(http, DetokenizeBody)
        self._serving.check_model(body.model)
        tokenizer = self._serving.need_tokenizer("tokens")
        refuse_unknown(body.tokens, self._serving.ready().vocab_size)
        text = await self._serving.background.run(lambda: tokenizer.decode(body.tokens))
        return json_response(Detokenized(text))
