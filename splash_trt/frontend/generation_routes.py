"""POST /v1/completions and /v1/chat/completions: makes engine requests of a body, and a response of their answers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

import msgspec
from aiohttp import web

from splash_trt.frontend.chat import ChatBody, render
from splash_trt.frontend.client_socket import Completion as LocalCompletion
from splash_trt.frontend.decoding import decode
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.event_stream import EventStream
from splash_trt.frontend.generation import Generation
from splash_trt.frontend.protocol import CompletionBody, GenerationBody
from splash_trt.frontend.reading import MessageReader, call_reader, markers
from splash_trt.frontend.reasoning import ReasoningReader, closed, opens_thinking
from splash_trt.frontend.refusals import clients_id
from splash_trt.frontend.sampling import DEFAULT_MAX_TOKENS, choice_seed, request_of, sampling_of
from splash_trt.frontend.serving import LONG_TEXT, Serving
from splash_trt.frontend.shapes import ChatShape, CompletionShape, Shape, Wanted
from splash_trt.frontend.stream import Answer, Echo, StopScanner
from splash_trt.frontend.structured import Form, form_of
from splash_trt.frontend.tokenizer import Detokenizer
from splash_trt.frontend.tools.events import Reader
from splash_trt.frontend.tools.forced import CallListReader, NamedCallReader
from splash_trt.link import Ready
from splash_trt.request import Request

log = logging.getLogger(__name__)

Prompt = tuple[int, ...]
NewAnswer = Callable[[Prompt], Answer]


class GenerationRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/chat/completions", self._chat)

    async def local_completion(self, data: bytes, request_id: str) -> LocalCompletion:
        """The completion that a local client asks for. data: a body of /v1/completions with one prompt. Raises ApiError
        if it is refused."""
        body = decode(data, CompletionBody)
        ready = self._check(body)
        prompts = await self._serving.encode(body.prompts(), ready.max_context)
        if len(prompts) * body.num_choices != 1:
            field = "n" if len(prompts) == 1 else "prompt"
            message = f"{field}: only one answer to one prompt is allowed here"
            raise ApiError(message, param=field)
        form = form_of(body)
        await self._serving.check_form(form, ready)
        requests = self._requests(body, request_id, prompts, form, ready, DEFAULT_MAX_TOKENS)
        return LocalCompletion(self._generation(requests, 1, self._completion_answer(body)), len(prompts[0]))

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await self._serving.body(http, CompletionBody)
        ready = self._check(body)
        form = form_of(body)
        prompts = await self._serving.encode(body.prompts(), ready.max_context)
        response_id = f"cmpl-{uuid.uuid4().hex}"
        requests = self._requests(body, response_id, prompts, form, ready, DEFAULT_MAX_TOKENS)
        await self._serving.check_form(form, ready)
        generation = self._generation(requests, body.num_choices, self._completion_answer(body))
        return await self._answer(http, body, generation, self._shape(CompletionShape, body, response_id))

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await self._serving.body(http, ChatBody)
        ready = self._check(body)
        form = form_of(body)
        text, prompt = await self._chat_prompt(body, form, ready)
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        requests = self._requests(body, response_id, [prompt], form, ready, None)
        await self._serving.check_form(form, ready)
        generation = self._generation(requests, body.num_choices, self._chat_answer(body, form, text))
        return await self._answer(http, body, generation, self._shape(ChatShape, body, response_id))

    def _check(self, body: GenerationBody) -> Ready:
        """Refuses, before the prompt is tokenized, what can be refused by then."""
        ready = self._serving.ready_to_generate(body.model)
        body.check()
        if body.stops:
            self._serving.need_tokenizer("stop")
        body.num_logprobs()
        return ready

    async def _chat_prompt(self, body: ChatBody, form: Form | None, ready: Ready) -> tuple[str, Prompt]:
        """The chat's prompt, as text and as token ids."""
        tokenizer = self._serving.need_tokenizer("messages")
        tools = None if body.tool_choice == "none" else body.tools

        def encode() -> tuple[str, Prompt]:
            text = render(tokenizer.chat_template, body.messages, tools, body.switches)
            if body.functions and form is None and self._serving.tool_parser == "none":
                message = "tools: how this model writes calls is not known; serve it with --tool-parser"
                raise ApiError(message, param="tools", code="no_tool_parser")
            text = text if form is None else closed(text)
            return text, tuple(tokenizer.encode_chat(text, ready.max_context))

        # Rendering takes long mostly for long texts, so only these are moved off the event loop.
        return await self._serving.background.run(encode) if _num_characters(body) > LONG_TEXT else encode()

    def _requests(
        self,
        body: GenerationBody,
        response_id: str,
        prompts: list[Prompt],
        form: Form | None,
        ready: Ready,
        default_max_tokens: int | None,
    ) -> list[Request]:
        """The engine's requests: for each prompt in turn, those of its n choices."""
        self._serving.check_count(len(prompts), body.num_choices)
        requests = []
        for number, prompt in enumerate(prompts):
            room = max(1, ready.max_context - len(prompt))
            sampling = sampling_of(body, self._serving.defaults, form and form.grammar, ready, room, default_max_tokens)
            for choice in range(body.num_choices):
                own = msgspec.structs.replace(sampling, seed=choice_seed(body.seed, choice))
                request_id = f"{response_id}-{number * body.num_choices + choice}"
                requests.append(request_of(request_id, prompt, own, ready))
        return requests

    def _completion_answer(self, body: CompletionBody) -> NewAnswer:
        alone = 0 in (body.max_tokens, body.max_completion_tokens)

        def new(prompt: Prompt) -> Answer:
            echo = Echo(prompt, body.logprobs, alone) if body.echo else None
            return Answer(self._detokenizer(body), _scanner(body), echo=echo, min_tokens=body.min_tokens or 0)

        return new

    def _chat_answer(self, body: ChatBody, form: Form | None, text: str) -> NewAnswer:
        """Makes the answers to a chat. text: the prompt's."""
        max_calls = 1 if body.parallel_tool_calls is False else None

        def new(prompt: Prompt) -> Answer:
            return Answer(
                self._detokenizer(body),
                _scanner(body),
                reader=self._reader(body, form, text),
                max_calls=max_calls,
                calls_are_stops=body.forced_function is not None,
                min_tokens=body.min_tokens or 0,
            )

        return new

    def _reader(self, body: ChatBody, form: Form | None, text: str) -> Reader | None:
        if body.forced_function is not None:
            return NamedCallReader(body.forced_function)
        if body.forces_calls:
            return CallListReader()
        if form is not None or not body.wants_text:
            return None
        thinks = self._serving.reasoning_parser != "none"
        thoughts = ReasoningReader(opens_thinking(text)) if thinks else None
        calls = call_reader(self._serving.tool_parser, body.functions) if body.functions else None
        return None if thoughts is None and calls is None else MessageReader(thoughts, calls)

    def _detokenizer(self, body: GenerationBody) -> Detokenizer | None:
        tokenizer = self._serving.tokenizer
        if tokenizer is None or not body.wants_text:
            return None
        show_all = body.skip_special_tokens is False
        if not isinstance(body, ChatBody):
            return tokenizer.detokenizer(show_all=show_all)
        tags = markers(self._serving.tool_parser, self._serving.reasoning_parser)
        return tokenizer.detokenizer(tokenizer.special_ids(tags), show_all)

    def _shape(self, kind: type[Shape], body: GenerationBody, response_id: str) -> Shape:
        tokenizer = self._serving.tokenizer if body.wants_text else None
        options = body.stream_options
        wanted = Wanted(
            logprobs=body.num_logprobs(),
            prompt_logprobs=body.prompt_logprobs,
            # Without text, token ids are the answer.
            token_ids=bool(body.return_token_ids) or tokenizer is None,
            usage_at_end=options is not None and options.include_usage,
            usage_always=options is not None and options.continuous_usage_stats,
        )
        return kind(
            response_id,
            self._serving.model_name,
            (lambda token: f"token_id:{token}") if tokenizer is None else tokenizer.token_name,
            None if tokenizer is None else tokenizer.token_bytes,
            wanted,
        )

    def _generation(self, requests: list[Request], num_choices: int, new_answer: NewAnswer) -> Generation:
        """Has to be submitted at once: it has been checked that there is room for it now."""
        self._serving.check_room(len(requests))
        answers = [new_answer(request.prompt) for request in requests]
        return Generation(self._serving.engine, self._serving.metrics, requests, answers, num_choices)

    async def _answer(
        self, http: web.Request, body: GenerationBody, generation: Generation, shape: Shape
    ) -> web.StreamResponse:
        self._serving.num_streams += 1
        try:
            generation.submit()
            return await (_stream if body.stream else _whole)(http, generation, shape)
        finally:
            generation.close()
            self._serving.num_streams -= 1


async def _whole(http: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
    async for _ in generation.run():
        pass
    body = shape.whole([answer.take() for answer in generation.answers], generation.counts())
    headers = {"X-Request-Id": clients_id(http) or shape.id}
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _stream(http: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
    stream = EventStream(http, {"X-Request-Id": clients_id(http) or shape.id})
    try:
        async with stream:
            await _write_events(stream, generation, shape)
    except ConnectionResetError:
        log.debug("%s: the client went away", shape.id)
    return stream.response


async def _write_events(stream: EventStream, generation: Generation, shape: Shape) -> None:
    def events(grown: list[int]) -> bytes:
        return b"".join([shape.chunk(index, generation.answers[index].take(), generation.counts) for index in grown])

    def send_now(grown: list[int]) -> bool:
        if not stream.takes_more:
            return False
        data = events(grown)
        if data:
            stream.write_now(data)
        return True

    try:
        opening = shape.opening(len(generation.answers), generation.counts)
        if opening:
            await stream.write(opening)
        async for grown in generation.run(send_now):
            data = events(grown)
            if data:
                await stream.write(data)
        await stream.write(shape.closing(generation.counts))
    except ConnectionResetError:
        raise
    except ApiError as error:
        await stream.end_with(error)
    except Exception:
        log.exception("%s failed", shape.id)
        await stream.end_with(ApiError("the server failed; its log says why", status=500))


def _scanner(body: GenerationBody) -> StopScanner:
    return StopScanner(body.stops, keep=bool(body.include_stop_str_in_output))


def _num_characters(body: ChatBody) -> int:
    """Roughly the length of the chat's text; tools count as LONG_TEXT each."""
    of_messages = sum(
        len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
        for content in (message.content for message in body.messages)
        if content is not None
    )
    return of_messages + LONG_TEXT * len(body.tools or ())
