"""Mistakes of clients: they get a 4xx that names the field, and the engine gets nothing."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from typing import Any

import pytest

from splash_trt.frontend.main import main
from tests.frontend.fake_engine import FakeEngine
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "listen"}}
BAD_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "[1]"}}

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [5, 400]}, "prompt"),  # beyond the vocabulary
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5] * 4096}, "prompt"),  # beyond the context
    ({"prompt": "word " * 5000}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 151}, "prompt"),  # more than may wait
    ({}, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "warm"}, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature"),  # Python writes NaN, which is not JSON
    ({"prompt": "a", "temperature": float("inf")}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.01}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "seed": -1}, "seed"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "stop": ["x"] * 1000}, "stop"),
    ({"prompt": "a", "stop": ["x", ""]}, "stop[1]"),
    ({"prompt": "a", "stop": "x" * 257}, "stop"),
    ({"prompt": "a", "stop": [5]}, "stop[0]"),
    ({"prompt": "a", "stop": "x", "detokenize": False}, "stop"),
    ({"prompt": "a", "stop_token_ids": [400]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [5] * 1000}, "stop_token_ids"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": ["a", "b"], "n": 76}, "n"),  # more than may wait
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "z"}, "suffix"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),  # of 16
    ({"prompt": "a", "logit_bias": {"400": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "guided_regex": "[a-z]", "guided_choice": ["a"]}, "guided_choice"),
    ({"prompt": "a", "guided_choice": []}, "guided_choice"),
    ({"prompt": "a", "guided_json": "no schema"}, "guided_json"),
    ({"prompt": "a", "guided_regex": ""}, "guided_regex"),
    ({"prompt": "a", "guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
    ({"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"prompt": "a", "structured_outputs": {"colour": 1}}, "structured_outputs.colour"),
    ({"prompt": "a", "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"prompt": "a", "colour": "red"}, "colour"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "long " * 5000}]}, "prompt"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "system"}, *USER]}, "messages[0].content"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens"),
    ({"messages": USER, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 5}, "logprobs"),
    ({"messages": USER, "n": 129}, "n"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": USER, "tools": [TOOL]}, "tools"),  # this template has no place for them
    ({"messages": USER, "tools": [TOOL] * 129}, "tools"),
    ({"messages": USER, "tools": [TOOL, TOOL]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "tool_choice": "perhaps"}, "tool_choice"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
    ({"messages": USER, "tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": USER, "response_format": {"type": "regex"}}, "response_format.regex"),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": USER, "store": True}, "store"),
    ({"messages": USER, "suffix": "z"}, "suffix"),
    ({"messages": USER, "prompt": "Hello"}, "prompt"),
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
NOT_TEXT = [IMAGE, AUDIO, {"type": "image", "source": {}}, {"type": "text", "txt": "Hello"}]
BAD_BYTES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"nonsense", None),
    (b"[]", None),
    (b'{"prompt": "a"', None),
    (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    (b'{"prompt": "a", "temperature": -Infinity}', "temperature"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "seed"),
    (b'{"prompt": "\xff\xfe"}', "prompt"),
    (b'{"user": "\xc3(", "prompt": "a"}', "user"),
    (b'{"prompt": "\\ud800"}', "prompt"),
    (b'{"prompt": ' + b"[" * 100_000, None),
    (b'{"colour": ' + b"[" * 100_000, None),
    (b"\x00" * 1000, None),
]


@pytest.mark.parametrize(("path", "cases"), [(COMPLETIONS, BAD_COMPLETIONS), (CHAT, BAD_CHATS)])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields(
    server: FrontendProcess, engine: FakeEngine, path: str, cases: list[tuple[dict[str, Any], str]], stream: bool
) -> None:
    before = len(engine.submitted)
    for body, param in cases:
        if stream and {"stream", "stream_options"} & body.keys():
            continue
        answer = server.ask("POST", path, {**body, "stream": True} if stream else body)
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, param), (body, error)
        assert param.split(".")[-1].split("[")[0] in error["message"] and set(error) == {
            "message",
            "type",
            "param",
            "code",
        }
        assert error["type"] == "invalid_request_error" and answer.headers["x-request-id"]
    assert len(engine.submitted) == before


@pytest.mark.parametrize("part", NOT_TEXT, ids=lambda part: part["type"])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_parts_that_are_no_text(server: FrontendProcess, path: str, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    answer = server.ask("POST", path, {"messages": [{"role": "user", "content": content}]})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "messages[0].content")
    assert "only text parts are supported" in error["message"]
    assert "without text" in error["message"] or repr(part["type"]) in error["message"]


def test_bad_bytes(server: FrontendProcess, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    for data, param in BAD_BYTES:
        answer = server.ask("POST", COMPLETIONS, data)
        error = answer.json["error"]
        assert answer.status == 400 and error["message"], data[:40]
        if param is not None:
            assert error["param"] == param, (data[:40], error)
    assert len(engine.submitted) == before


def test_body_of_50_megabytes(server: FrontendProcess, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    # Announced: refused before it is sent.
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 52428800\r\n\r\n{")
        assert b" 413 " in connection.recv(4096)
    # Not announced: refused when it gets too long.
    connection_ = server.connect()
    connection_.request("POST", COMPLETIONS, iter([b'{"prompt": "'] + [b"x" * (1 << 20)] * 20), encode_chunked=True)
    response = connection_.getresponse()
    assert response.status == 413 and b'"param":"body"' in response.read()
    connection_.close()
    # Small, and large when decompressed.
    answer = server.ask("POST", COMPLETIONS, gzip.compress(b" " * (50 << 20)), **{"Content-Encoding": "gzip"})
    assert answer.status == 413 and answer.json["error"]["param"] == "body"
    assert len(engine.submitted) == before


def test_what_is_no_http(server: FrontendProcess) -> None:
    answer = server.ask("POST", COMPLETIONS, b"nonsense", **{"Content-Encoding": "gzip"})
    assert answer.status == 400 and answer.json["error"]["param"] == "body"
    assert answer.json["error"]["message"] == "body: not valid gzip"
    for encoding in ("colour", "gzip, gzip"):
        answer = server.ask("POST", COMPLETIONS, {"prompt": [5]}, **{"Content-Encoding": encoding})
        assert answer.status == 415 and answer.json["error"]["param"] == "Content-Encoding"
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    long_line = b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n"
    for data, status in (
        (b"nonsense\r\n\r\n", 400),
        (post + b"Content-Length: -5\r\n\r\n", 400),
        (post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", 400),
        (post + b"X: " + b"x" * 10_000 + b"\r\n\r\n", 400),
        (long_line, 400),
        (post + b"Expect: wonders\r\nContent-Length: 2\r\n\r\n{}", 417),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(data)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == status and response.headers["X-Request-Id"], data[:100]
            error = json.loads(response.read())["error"]
            assert error["type"] == "invalid_request_error" and 0 < len(error["message"]) <= 300
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(post + b"Content-Length: 100\r\n\r\n{")  # and goes away
    assert server.ask("GET", "/healthz").status == 200
    assert not any("Traceback" in line for line in server.log), server.log


def test_errors_do_not_repeat_all_that_was_sent(server: FrontendProcess) -> None:
    long = "x" * 5000
    for path, body in (
        (COMPLETIONS, {"prompt": "a", long: 1}),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": long}}),
        (COMPLETIONS, {"prompt": "a", "model": long}),
        (CHAT, {"messages": [{"role": long, "content": "x"}]}),
        (CHAT, {"messages": USER, "chat_template_kwargs": {long: long}, "colour" * 1000: 1}),
        ("/v1/layout", {"layout": long}),
        (f"/{long}", {}),
    ):
        refused = server.ask("POST", path, body)
        assert refused.status in (400, 404) and len(refused.data) < 700
        assert refused.json["error"]["message"].count("x") < 300


def test_content_that_may_be_null(server: FrontendProcess) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    assert server.ask("POST", CHAT, {"messages": asked, "max_tokens": 1}).status == 200


def test_neutral_values_that_clients_send_unasked(server: FrontendProcess) -> None:
    body = {"prompt": "a", "max_tokens": 1, "n": 1, "best_of": 1, "echo": False, "suffix": "", "user": "u"}
    assert server.ask("POST", COMPLETIONS, {**body, "presence_penalty": 0, "logit_bias": {}, "top_k": -1}).status == 200
    chat = {"messages": USER, "max_tokens": 1, "response_format": {"type": "text"}, "tools": None, "stop": None}
    assert server.ask("POST", CHAT, {**chat, "temperature": None, "stream": None}).status == 200


def test_numbers_larger_than_a_message_holds(server: FrontendProcess, engine: FakeEngine) -> None:
    body = {"prompt": "<|end|>", "max_tokens": 2, "top_k": 10**30}
    assert server.ask("POST", COMPLETIONS, body).status == 200
    assert engine.submitted[-1].sampling.top_k == 0


@pytest.mark.parametrize("asked", [4096, 10**30])
def test_more_output_than_the_context_holds(server: FrontendProcess, engine: FakeEngine, asked: int) -> None:
    before = len(engine.submitted)
    answer = server.ask("POST", COMPLETIONS, {"prompt": "<|end|>", "max_tokens": asked})
    assert answer.status == 400 and answer.json["error"]["param"] == "max_tokens"
    assert "room for 4095" in answer.json["error"]["message"] and len(engine.submitted) == before


def test_unknown_routes_and_methods(server: FrontendProcess) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/layout", 405)):
        answer = server.ask(method, path)
        assert answer.status == status and path in answer.json["error"]["message"]
    assert server.ask("GET", "/v1/models/another").json["error"]["param"] == "model"


def test_without_a_tokenizer(shared: tuple[FakeEngine, str]) -> None:
    engine, address = shared
    frontend = wait_until_ready(start_frontend(address, "--keep-engine"))
    try:
        ids = {"prompt": [7, 8, 9], "max_tokens": 4, "logprobs": 1}
        answer = frontend.ask("POST", COMPLETIONS, ids).json["choices"][0]
        assert answer["token_ids"] == [7, 8, 9, 7] and answer["text"] == ""
        assert answer["logprobs"]["tokens"] == ["token_id:7", "token_id:8", "token_id:9", "token_id:7"]
        events = frontend.ask("POST", COMPLETIONS, {**ids, "stream": True}).events
        assert [t for event in events for t in event["choices"][0]["token_ids"]] == [7, 8, 9, 7]
        before = len(engine.submitted)
        for path, body, param in (
            (COMPLETIONS, {"prompt": "text"}, "prompt"),
            (COMPLETIONS, {"prompt": [7], "stop": "x"}, "stop"),
            (CHAT, {"messages": USER}, "messages"),
        ):
            refused = frontend.ask("POST", path, body)
            assert (refused.status, refused.json["error"]["param"]) == (400, param)
            assert "tokenizer.json" in refused.json["error"]["message"]
        assert len(engine.submitted) == before
    finally:
        frontend.end()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--engine", "tcp://1.2.3.4:5"), "ipc://"),
        (("--engine", "ipc:///" + "x" * 120), "107"),
        (("--port", "70000"), "port"),
        (("--max-queued", "0"), "max_queued"),
        (("--tokenizer", "/nowhere"), "tokenizer.json"),
        (("--lifeline", "77"), "lifeline"),
    ],
)
def test_bad_flags(flags: tuple[str, str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "ipc:///tmp/splash-none", "--model-name", "echo", "--port", "0", *flags]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("depth", [100, 900, 930, 960, 985, 1100])
def test_what_nests_deeply(server: FrontendProcess, depth: int) -> None:
    text = "[" * depth + "]" * depth
    for path, body in (
        (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "guided_json": {"a": %s}}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": {"a": %s}}'),
        (
            CHAT,
            '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tool_choice": "required", "tools": '
            '[{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]}',
        ),
    ):
        assert server.ask("POST", path, (body % text).encode()).status in (200, 400)
    assert not any("Traceback" in line for line in server.log), server.log
