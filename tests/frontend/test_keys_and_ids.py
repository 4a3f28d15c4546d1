"""API keys, request ids, clients that close their sending side, queues, a checkpoint's defaults, /tokenize and
/detokenize."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from splash_trt.frontend.main import main
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.version import __version__
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until, wait_until_ready

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": [7, 8, 9], "max_tokens": 4000, "ignore_eos": True}
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def locked(shared: tuple[FakeEngine, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text("  secret-key \nmore\n")
    flags = ("--keep-engine", "--api-key-file", str(file), "--api-key-for-metrics")
    frontend = start_frontend(shared[1], *flags)
    wait_until(lambda: frontend.ask("GET", "/readyz").status == 200)
    yield frontend
    frontend.end()


def test_keys(locked: FrontendProcess, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    body = {"prompt": [5], "max_tokens": 1}
    for wrong in (
        "",
        "Bearer ",
        "Bearer secret",
        "Basic secret-key",
        "Bearer secret-keys",
        "secret-key",
        "Bearer \xff",
    ):
        answer = locked.ask("POST", COMPLETIONS, body, Authorization=wrong)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["code"] == "invalid_api_key" and answer.headers["x-request-id"]
    for path in ("/v1/models", "/v1/layout", "/metrics", "/tokenize", "/nowhere"):
        assert locked.ask("GET", path).status == 401
    assert len(engine.submitted) == before
    for path in ("/healthz", "/health", "/readyz", "/version", "/openapi.json"):
        assert locked.ask("GET", path).status == 200
    root = locked.ask("GET", "/")
    assert (root.status, root.headers["location"]) == (302, "/dashboard")
    right = {"Authorization": "Bearer secret-key"}
    assert locked.ask("POST", COMPLETIONS, body, **right).status == 200
    assert locked.ask("GET", "/metrics", **right).status == 200
    document = locked.ask("GET", "/openapi.json").json
    assert document["paths"]["/v1/models"]["get"]["security"] and "security" not in document["paths"]["/healthz"]["get"]
    assert not any("secret" in line for line in locked.log)


def test_keys_as_the_client_sends_them(locked: FrontendProcess) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="secret-key", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["echo"]
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="other", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_metrics_are_open_otherwise(server: FrontendProcess) -> None:
    assert server.ask("GET", "/metrics").status == 200


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--api-key", "a", "--api-key-file", "b"), "not both"),
        (("--api-key", "two words"), "api_key"),
        (("--api-key", ""), "api_key"),
        (("--api-key-file", "/nowhere/key"), "api_key_file"),
        (("--api-key-file", "/dev/null"), "api_key_file"),
    ],
)
def test_bad_keys(flags: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "ipc:///tmp/splash-none", "--model-name", "echo", "--port", "0", *flags]) == 2
    assert word in capsys.readouterr().err


def test_request_ids(server: FrontendProcess, engine: FakeEngine) -> None:
    body = {"prompt": [5], "max_tokens": 1}
    mine = {"X-Request-Id": "mine-1"}
    before = len(engine.submitted)
    for sent in ({**body, "stream": True}, body, {**body, "temperature": -1}, {**body, "model": "another"}):
        assert server.ask("POST", COMPLETIONS, sent, **mine).headers["x-request-id"] == "mine-1"
    assert server.ask("GET", "/healthz", **mine).headers["x-request-id"] == "mine-1"
    assert len({request.id for request in engine.submitted[before:]}) == 2  # its own names are not the client's
    for bad in ("", "two words", "x" * 201, "\xe9"):
        answer = server.ask("POST", COMPLETIONS, body, **{"X-Request-Id": bad})
        assert answer.headers["x-request-id"] == answer.json["id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_ends_its_side_gets_its_answer(server: FrontendProcess, path: str, stream: bool) -> None:
    asked = {"prompt": [7, 8, 9]} if path == COMPLETIONS else {"messages": USER}
    data = json.dumps({**asked, "max_tokens": 300, "ignore_eos": True, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)  # skips interim responses, as clients must
        response.begin()
        assert response.status == 200
        answer = response.read()
        assert answer.endswith(b"[DONE]\n\n") if stream else json.loads(answer)["usage"]["completion_tokens"] == 300
        assert connection.recv(10) == b"", "the connection stays open"


def test_a_side_that_ends_amid_a_request(server: FrontendProcess, engine: FakeEngine) -> None:
    before = len(engine.submitted)
    for sent in (b"", b"POST /v1/comple", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) in (b"",), "nothing was asked"
    assert len(engine.submitted) == before


def test_explain(server: FrontendProcess, engine: FakeEngine) -> None:
    about = server.ask("GET", "/v1/layout?explain=1").json
    assert about["explain"] == {"chosen": engine.layout, "compared": [{"layout": "dp", "gain": 0.5123}]}
    assert about["layouts"] and "explain" not in server.ask("GET", "/v1/layout?explain=0").json
    for query in ("explain=perhaps", "explain=", "explain=1&explain=1"):
        refused = server.ask("GET", f"/v1/layout?{query}")
        assert refused.status == 400 and refused.json["error"]["param"] == "explain"
    engine.silent_to_explain = True
    try:
        silent = server.ask("GET", "/v1/layout?explain=1")
        assert silent.status == 200 and silent.json == {
            **{field: value for field, value in about.items() if field != "explain"},
            "explain": None,
            "explain_error": "the engine did not answer within 8 s",
        }
    finally:
        engine.silent_to_explain = False


def test_tokenize(server: FrontendProcess, tokenizer: Tokenizer) -> None:
    answer = server.ask("POST", "/tokenize", {"prompt": "the dog", "return_token_strs": True}).json
    ids = tokenizer.encode("the dog")
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 4096)
    assert answer["token_strs"] == [tokenizer.token_name(token) for token in ids]
    chat = server.ask("POST", "/tokenize", {"messages": USER, "model": "echo"}).json
    text = "".join(tokenizer.token_name(token) for token in chat["tokens"])
    assert text == "<|begin|><|user|>Hello\n<|assistant|>" and chat["token_strs"] is None
    bare = server.ask("POST", "/tokenize", {"messages": USER, "add_generation_prompt": False}).json
    assert bare["tokens"] == chat["tokens"][:-1]
    back = server.ask("POST", "/detokenize", {"tokens": chat["tokens"]}).json
    assert back == {"prompt": text}
    unknown = server.ask("POST", "/detokenize", {"tokens": [5, 400]}).json["error"]["message"]
    assert unknown == "tokens[1]: 400 is not allowed; the vocabulary has 400 tokens, so ids are from 0 to 399"
    assert server.ask("POST", "/tokenize", {"prompt": ""}).json["tokens"] == []
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x " * (6 << 20)}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1 << 32]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 2, 99999]}, "tokens[2]"),
        ("/detokenize", {}, "tokens"),
    ):
        refused = server.ask("POST", path, body)
        assert (refused.status, refused.json["error"]["param"]) == (400, param), (path, refused.data[:200])
    assert server.ask("POST", "/tokenize", {"prompt": "a", "model": "another"}).status == 404


def test_version(server: FrontendProcess) -> None:
    assert server.ask("GET", "/version").json == {"version": __version__}


def test_defaults_of_the_checkpoint(shared: tuple[FakeEngine, str], tokenizer_folder: Path, tmp_path: Path) -> None:
    engine, address = shared
    shutil.copytree(tokenizer_folder, tmp_path / "t")
    path = tmp_path / "t" / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.25, "top_p": 0.5, "top_k": 9, "eos_token_id": 1, "max_new_tokens": 3}))
    flags = ("--keep-engine", "--tokenizer", str(tmp_path / "t"))

    def sampling(frontend: FrontendProcess, **body: Any) -> Any:
        assert frontend.ask("POST", COMPLETIONS, {"prompt": "a", **body}).status == 200
        return engine.submitted[-1].sampling

    frontend = wait_until_ready(start_frontend(address, *flags))
    try:
        unsaid = sampling(frontend)
        assert (unsaid.temperature, unsaid.top_p, unsaid.top_k, unsaid.max_tokens) == (0.25, 0.5, 9, 3)
        said = sampling(frontend, temperature=1, top_p=1, top_k=0, max_tokens=5)
        assert (said.temperature, said.top_p, said.top_k, said.max_tokens) == (1, 1, 0, 5)
        assert sampling(frontend, temperature=0).temperature == 0
    finally:
        frontend.end()
    frontend = wait_until_ready(start_frontend(address, *flags, "--generation-config", "none"))
    try:
        unsaid = sampling(frontend)
        assert (unsaid.temperature, unsaid.top_p, unsaid.top_k, unsaid.max_tokens) == (1, 1, 0, 16)
    finally:
        frontend.end()


@pytest.mark.parametrize("text", ["[", "[]", '{"temperature": "warm"}', '{"top_p": 7}'])
def test_bad_defaults(text: str, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    argv = ["--engine", "ipc:///tmp/splash-none", "--model-name", "echo", "--port", "0", "--tokenizer", str(tmp_path)]
    assert main(argv) == 2
    assert "generation_config.json" in capsys.readouterr().err


def test_newcomers_are_told_while_streams_finish(address: str) -> None:
    engine = FakeEngine(address, ready_message(400), step_s=0.01)
    engine.start()
    frontend = wait_until_ready(start_frontend(address, "--shutdown-deadline", "30"))
    try:
        connection = frontend.connect()
        connection.request("POST", COMPLETIONS, json.dumps({**ENDLESS, "max_tokens": 100, "stream": True}))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        frontend.process.send_signal(signal.SIGTERM)
        wait_until(lambda: any("ending" in line for line in frontend.log))
        refused = frontend.ask("POST", COMPLETIONS, {"prompt": [5]})
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["code"] == "shutting_down"
        assert frontend.ask("GET", "/readyz").status == 503
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert frontend.wait_for_exit() == 0
    finally:
        frontend.end()
        engine.stop()


def test_n_counts_in_the_queue(address: str) -> None:
    engine = FakeEngine(address, ready_message(400))
    engine.start()
    engine.paused.set()
    frontend = wait_until_ready(start_frontend(address, "--max-queued", "3"))
    try:
        answers: list[int] = []
        body = {"prompt": [5], "max_tokens": 1, "n": 2}
        thread = threading.Thread(target=lambda: answers.append(frontend.ask("POST", COMPLETIONS, body).status))
        thread.start()
        wait_until(lambda: len(engine.submitted) == 2)
        refused = frontend.ask("POST", COMPLETIONS, body)
        assert refused.status == 429 and refused.json["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1 and len(engine.submitted) == 2
        engine.paused.clear()
        thread.join()
        assert answers == [200]
    finally:
        frontend.end()
        engine.stop()
