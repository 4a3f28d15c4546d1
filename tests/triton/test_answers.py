"""The demo model on a CPU rank, asked over HTTP and through Triton: the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from splash_engines.build import build_engine
from splash_trt.triton_backend.command import write_repository
from tests.e2e.conftest import SIZES
from tests.e2e.servers import MODEL, Server, wait_until
from tests.triton.servers import TritonServer

PROMPTS = ("Once upon a time", "The little dog", "It was raining, so")


@pytest.fixture(scope="module")
def both(
    triton_installed: None, socket_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, TritonServer]]:
    engine = tmp_path_factory.mktemp("triton-engine") / "splash-tiny"
    build_engine(MODEL, engine)
    endpoint = f"ipc://{socket_folder}/real-clients"
    flags = ["--engine", str(engine), "--dtype", "float64", "--client-endpoint", endpoint, *SIZES]
    write_repository(socket_folder / "real", endpoint, "splash")
    triton = TritonServer(socket_folder / "real")
    server = Server("supervised", 1, flags)
    try:
        server.wait_until_ready()
        triton.wait_until_ready()
        wait_until(lambda: triton.generate(text_input="a", max_tokens=1)[0] == 200, why="an answer through Triton")
        yield server, triton
    finally:
        triton.close()
        server.close()


GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_answers_are_those_over_http(both: tuple[Server, TritonServer], sampling: dict[str, Any]) -> None:
    server, triton = both
    cases = [(prompt, 16 + number) for number, prompt in enumerate(PROMPTS)]

    def over_http(case: tuple[str, int]) -> tuple[str, str]:
        body = {"prompt": case[0], "max_tokens": case[1], "seed": case[1], **sampling}
        [choice] = server.ask("POST", "/v1/completions", body).json["choices"]
        return choice["text"], choice["finish_reason"]

    def through_triton(case: tuple[str, int]) -> tuple[str, str]:
        body = {"max_tokens": case[1], "random_seed": case[1], "return_finish_reason": True, **sampling}
        status, answer = triton.generate(text_input=case[0], exclude_input_in_output=True, **body)
        assert status == 200, answer
        return answer["text_output"], answer["finish_reason"]

    def as_a_stream(case: tuple[str, int]) -> tuple[str, str]:
        given = json.dumps({"max_tokens": case[1], "seed": case[1], **sampling})
        events = list(
            triton.generate_stream(
                text_input=case[0], stream=True, return_finish_reason=True, sampling_parameters=given
            )
        )
        return "".join(event["text_output"] for event in events), events[-1]["finish_reason"]

    with ThreadPoolExecutor(9) as pool:
        answers = [list(pool.map(ask, cases)) for ask in (over_http, through_triton, as_a_stream)]
    assert answers[0] == answers[1] == answers[2]
    assert all(text for text, _ in answers[0]) and len({text for text, _ in answers[0]}) == 3


def test_errors_are_those_over_http(both: tuple[Server, TritonServer]) -> None:
    server, triton = both
    message = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 10**6}).json["error"]["message"]
    status, answer = triton.generate(text_input="a", max_tokens=10**6)
    assert status == 400 and answer["error"] == message


def test_a_cancelled_stream_frees_the_engine(both: tuple[Server, TritonServer]) -> None:
    server, triton = both
    events = triton.generate_stream(text_input="a", max_tokens=400, stream=True, ignore_eos=True)
    next(events)

    def running() -> int:
        return int(server.ask("GET", "/v1/layout").json["status"]["running"])

    assert running() == 1
    events.close()  # type: ignore[attr-defined]
    wait_until(lambda: running() == 0, why="the engine's being idle")
