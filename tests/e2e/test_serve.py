"""Two ranks under a real mpirun, over real HTTP, with OpenAI's client."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import zmq

from splash_trt import link
from splash_trt.request import Request, SamplingParams
from tests.e2e.servers import MODEL, Server, StreamReader, wait_until

pytestmark = pytest.mark.mpi

LAYOUTS = ("dp", "dop", "cp", "tp")
NAME = "splash-tiny"
TEXT = "ROMEO.\nBut soft, what light through yonder window breaks?\n"
LONG = 120  # tokens; enough for four switches to begin and to end in


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def layout(server: Server) -> Any:
    return server.ask("GET", "/v1/layout").json


def settled(server: Server, name: str) -> bool:
    status = layout(server)["status"]
    return bool(status["layout"] == name and status["switch"] == "steady")


def go_to(server: Server, name: str) -> None:
    """Pin a layout and wait until it serves."""
    reply = server.ask("POST", "/v1/layout", {"layout": name, "pin": True})
    assert reply.status == 200, reply.data
    wait_until(lambda: settled(server, name), 60, f"layout {name}")


def wait_until_free(server: Server) -> None:
    wait_until(lambda: set(layout(server)["status"]["used_tokens"]) == {0}, 30, "all cache free")


def test_says_where_it_listens_once_it_serves(server: Server) -> None:
    assert f"listening on {server.url} for {NAME}" in server.log
    assert server.ask("GET", "/healthz").status == 200


def test_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model=NAME, prompt=[TEXT, "JULIET.\n"], max_tokens=12, seed=3, temperature=0.8)
    whole = client.completions.create(**asked, logprobs=1)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and len(logprobs.token_logprobs) == 12
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert any(character.isalpha() for character in texts[0])


def test_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Romeo"}]
    whole = client.chat.completions.create(model=NAME, messages=messages, max_tokens=12, temperature=0)
    content = whole.choices[0].message.content
    chunks = client.chat.completions.create(model=NAME, messages=messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert content


def bodies(max_tokens: int) -> list[dict[str, Any]]:
    """Greedy and sampled, short and long."""
    common = {"max_tokens": max_tokens}
    return [
        {"prompt": TEXT, "temperature": 0, **common},
        {"prompt": TEXT * 6, "temperature": 0.9, "top_p": 0.9, "seed": 1, **common},
        {"prompt": TEXT * 2, "temperature": 1.1, "top_k": 40, "seed": 2, **common},
    ]


def finish(readers: list[StreamReader]) -> list[list[int]]:
    for reader in readers:
        reader.join(120)
        assert reader.done and reader.error is None, (reader.error, reader.broken)
    return [reader.tokens for reader in readers]


def test_switches_in_mid_stream_change_no_token(server: Server) -> None:
    go_to(server, "tp")
    wait_until_free(server)
    before = len(server.ask("GET", "/v1/switches").json["data"])
    expected = finish([StreamReader(server, body) for body in bodies(LONG)])
    assert len(server.ask("GET", "/v1/switches").json["data"]) == before, "the reference run switched"
    assert [len(tokens) for tokens in expected] == [LONG] * 3
    readers = [StreamReader(server, body) for body in bodies(LONG)]
    wait_until(lambda: all(len(reader.tokens) > 4 for reader in readers), 60, "the first tokens")
    seen = {}
    for target in LAYOUTS:
        go_to(server, target)
        seen[target] = [len(reader.tokens) for reader in readers]
    assert max(seen["tp"]) < LONG - 4, f"streams ended before the last switch: {seen}"
    print("tokens of each stream when a layout served:", seen)
    assert finish(readers) == expected
    wait_until_free(server)


def test_switches_are_recorded(server: Server) -> None:
    go_to(server, "dp")
    go_to(server, "tp")
    reader = StreamReader(server, {"prompt": TEXT * 6, "max_tokens": LONG, "temperature": 0})
    wait_until(lambda: reader.tokens, 60, "the first token")
    for target in ("dp", "tp"):
        go_to(server, target)
    finish([reader])
    to_tp, to_dp, *_ = server.ask("GET", "/v1/switches").json["data"]
    assert (to_dp["source"], to_dp["target"], to_dp["outcome"]) == ("tp", "dp", "committed")
    assert (to_tp["source"], to_tp["target"], to_tp["outcome"]) == ("dp", "tp", "committed")
    assert to_tp["number"] == to_dp["number"] + 1 and to_tp["why"] == "an operator asked for it"
    # Towards DP the other rank's heads come in and pages are forgotten; back, the owner's pages go to the other.
    assert to_dp["bytes_between_ranks"]["weights"] > 0 and to_dp["bytes_between_ranks"]["pages"] == 0
    assert to_tp["bytes_between_ranks"]["weights"] == 0 and to_tp["bytes_between_ranks"]["pages"] > 0
    for record in (to_dp, to_tp):
        assert sum(record["seconds_in"].values()) > 0 and sum(record["steps_in"].values()) > 0
        assert record["stall_s"] is not None
    assert b'splash_switches_total{outcome="committed",source="tp",target="dp"}' in server.ask("GET", "/metrics").data


def test_pin_and_back_to_auto(server: Server) -> None:
    go_to(server, "cp")
    assert layout(server)["mode"] == "pinned"
    assert server.ask("POST", "/v1/layout", {"layout": "auto"}).status == 200
    wait_until(lambda: layout(server)["mode"] == "auto", 10, "auto")
    go_to(server, "tp")


def test_a_hundred_clients_at_once(client: openai.OpenAI, server: Server) -> None:
    def ask(number: int) -> list[int]:
        prompt, more = [2 + number, 3, 4], {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=4, temperature=0, extra_body=more)
        return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(ask, range(100)))
    assert all(len(answer) == 4 for answer in answers)
    assert [ask(number) for number in (0, 50, 99)] == [answers[0], answers[50], answers[99]]
    wait_until_free(server)


def test_a_client_that_goes_away_is_cancelled(client: openai.OpenAI, server: Server) -> None:
    wait_until_free(server)
    stream = client.completions.create(
        model=NAME, prompt=TEXT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert sum(layout(server)["status"]["used_tokens"]) > 0
    stream.close()
    wait_until_free(server)
    assert layout(server)["status"]["running"] == 0


def test_a_frontend_that_goes_away_is_cancelled(server: Server) -> None:
    """Other programs than the run's own frontend may speak to rank 0."""
    wait_until_free(server)
    (path,) = server.folder.glob("splash-trt-*/link")
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.connect(f"ipc://{path}")
        sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
        other.send(link.encode(link.Submit(Request(id="mine", prompt=(3, 4, 5), sampling=sampling))))
        wait_until(lambda: layout(server)["status"]["running"] == 1, 30, "the request runs")
    wait_until_free(server)
    assert layout(server)["status"]["running"] == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [5, 99999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [7] * 5000}, "prompt"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        ({"prompt": "x", "stop": ["a"] * 1000}, "stop"),
        (b'{"prompt": "\xff"}', "prompt"),
        (b'{"prompt": "' + b"x" * (20 << 20) + b'"}', "body"),
    ],
)
def test_wrong_input_is_refused(server: Server, body: object, field: str) -> None:
    reply = server.ask("POST", "/v1/completions", body)
    assert 400 <= reply.status < 500
    assert reply.json["error"]["param"] == field and field in reply.json["error"]["message"]


def test_wrong_input_reached_nobody(server: Server) -> None:
    assert "Traceback" not in server.log and "ERROR" not in server.log, server.log
    assert server.ask("GET", "/readyz").status == 200


def test_a_config_alone_with_ranks_of_our_own(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    flags = ["--model", str(tmp_path), "--dummy-weights", "7", "--memory", "256M", "--layout", "dp", "--name", "dummy"]
    trace = tmp_path / "trace.json"
    server = Server("supervised", 2, [*flags, "--trace", str(trace), "--log-format", "json"])
    try:
        server.wait_until_ready()
        assert f"listening on {server.url} for dummy" in server.log
        asked = {"prompt": [3, 4, 5], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        first, second = (server.ask("POST", "/v1/completions", asked).json["choices"][0] for _ in range(2))
        assert len(first["token_ids"]) == 5 and first["token_ids"] == second["token_ids"]
        wait_until(lambda: settled(server, "dp"), 60, "the layout that was asked for")
        assert layout(server)["mode"] == "pinned"
        refused = server.ask("POST", "/v1/completions", {"prompt": "text"})
        assert refused.status == 400 and refused.json["error"]["param"] == "prompt"
        go_to(server, "tp")
        assert server.ask("POST", "/v1/completions", asked).status == 200
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0, server.log
        assert time.monotonic() - began < 15 and not server.alive() and not server.leftovers()
        assert "Traceback" not in server.log, server.log
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert {line["source"] for line in lines} == {"frontend", "rank 0"}
        (serving,) = [line for line in lines if line["message"] == "serving"]
        about = {"model": "dummy", "ranks": 2, "run_on": "cpu", "dtype": "bfloat16", "layout": "dp", "mode": "pinned"}
        assert serving.items() >= about.items() and serving["cache_tokens"].keys() == {"tp", "dp", "cp", "dop"}
        assert [line["message"] for line in lines if "ending" in line["message"]] == ["ending: SIGINT"]
        (switch,) = [line for line in lines if line["message"] == "switch"]
        assert (switch["rank"], switch["target"], switch["outcome"]) == (0, "tp", "committed")
        events = json.loads(trace.read_text())
        assert {event["name"] for event in events if event["ph"] == "X"} >= {"dp", "tp"}
        assert [event["pid"] for event in events if event["name"] == "commit: tp"] == [0, 1]
    finally:
        server.close()


def test_z_a_killed_mpirun_ends_everything(server: Server, engine: Path) -> None:
    """The last of this file, as it ends the server that the others share."""
    reader = StreamReader(server, {"prompt": [5, 6, 7], "max_tokens": 3000})
    wait_until(lambda: reader.tokens, 60, "the first token")
    server.look()
    server.find("mpirun").kill()
    wait_until(lambda: not server.alive(), 10, f"all gone\n{server.log}")
    assert server.process.wait() == -signal.SIGKILL and not server.leftovers()
    reader.join(10)
    assert reader.error is not None and reader.error["code"] == "engine_ended"
    # A trace that nobody ended: without its "]", and maybe without the end of its last line.
    whole = (engine.parent / "trace.json").read_text().rpartition(",\n")[0]
    assert {event["name"] for event in json.loads(whole + "]") if event["ph"] == "X"} >= set(LAYOUTS)
