"""Many streams at once, and what happens to them when a client, the frontend or Triton's program goes away."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from splash_trt.triton_backend.command import write_repository
from tests.e2e.servers import free_port, wait_until
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready
from tests.triton.conftest import Stack
from tests.triton.servers import TritonServer

ENDLESS: dict[str, Any] = {"text_input": "abc", "max_tokens": 4000, "sampling_parameters": '{"ignore_eos": true}'}
NUM_STREAMS = 64


def grpc_inputs(text: str, max_tokens: int, stream: bool = True) -> list[Any]:
    values = (
        ("text_input", "BYTES", np.array([text], object)),
        ("stream", "BOOL", np.array([stream])),
        ("max_tokens", "INT32", np.array([max_tokens], np.int32)),
    )
    inputs = []
    for name, kind, value in values:
        inputs.append(grpc_client.InferInput(name, [1], kind))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def echo(text: str, num_tokens: int) -> str:
    """What the engine answers to a text of one token a character."""
    return (text * num_tokens)[:num_tokens]


def test_64_streams_over_grpc(stack: Stack) -> None:
    """On one connection, all under way at once; each gets all of its own, in order."""
    stack.engine.paused.set()
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    before = len(stack.engine.submitted)
    with grpc_client.InferenceServerClient(stack.triton.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(NUM_STREAMS):
            inputs = grpc_inputs(f"{number:02d}z", 40 + number)
            client.async_stream_infer("splash", inputs, request_id=str(number), enable_empty_final_response=True)
        wait_until(lambda: len(stack.engine.submitted) - before == NUM_STREAMS, why="all requests in the engine")
        stack.engine.paused.clear()
        texts, ended = [""] * NUM_STREAMS, 0
        while ended < NUM_STREAMS:
            result, error = answers.get(timeout=60)
            assert error is None
            response = result.get_response()
            text = result.as_numpy("text_output")
            texts[int(response.id)] += "" if text is None else text[0].decode()
            ended += response.parameters["triton_final_response"].bool_param
    assert texts == [echo(f"{number:02d}z", 40 + number) for number in range(NUM_STREAMS)]


def test_64_streams_over_http(stack: Stack) -> None:
    def ask(number: int) -> str:
        events = stack.triton.generate_stream(text_input=f"{number:02d}y", max_tokens=40 + number, stream=True)
        return "".join(event["text_output"] for event in events)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = list(pool.map(ask, range(NUM_STREAMS)))
    assert texts == [echo(f"{number:02d}y", 40 + number) for number in range(NUM_STREAMS)]


def test_cancelling_over_grpc_stops_the_engine(stack: Stack) -> None:
    before = len(stack.engine.submitted)
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = grpc_client.InferenceServerClient(stack.triton.grpc_url)
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("splash", grpc_inputs("abc", 4000))
    assert answers.get(timeout=60)[1] is None
    client.stop_stream(cancel_requests=True)
    client.close()
    [request] = stack.engine.submitted[before:]
    wait_until(lambda: request.id in stack.engine.cancelled, why="the engine's being told")


def test_a_client_of_the_stream_that_goes_away_stops_the_engine(stack: Stack) -> None:
    before = len(stack.engine.submitted)
    events = stack.triton.generate_stream(**ENDLESS, stream=True)
    assert next(events)["text_output"]
    events.close()  # type: ignore[attr-defined]
    [request] = stack.engine.submitted[before:]
    wait_until(lambda: request.id in stack.engine.cancelled, why="the engine's being told")


class OwnStack:
    """One whose parts may be killed. At most two requests may be under way."""

    def __init__(self, folder: Path, tokenizer_folder: Path) -> None:
        self.link, self.endpoint = f"ipc://{folder}/own-link", f"tcp://127.0.0.1:{free_port()}"
        self._tokenizer = str(tokenizer_folder)
        self.engine = FakeEngine(self.link, ready_message(400), step_s=0.01)
        self.engine.start()
        self.frontend = self.start_frontend()
        self._repository = folder / "own-repository"
        write_repository(self._repository, self.endpoint, "splash", max_requests=2)
        self.triton = self.start_triton()
        wait_until(self.answers, why="an answer")

    def start_triton(self) -> TritonServer:
        flags = ("--model-control-mode=explicit", "--load-model=splash")
        return TritonServer(self._repository, *flags).wait_until_ready()

    def start_frontend(self) -> FrontendProcess:
        flags = ("--tokenizer", self._tokenizer, "--keep-engine", "--client-endpoint", self.endpoint)
        return wait_until_ready(start_frontend(self.link, *flags, "--shutdown-deadline", "0.5"))

    def answers(self) -> bool:
        return self.triton.generate(text_input="abc", max_tokens=3)[0] == 200

    def close(self) -> None:
        self.triton.close()
        self.frontend.end()
        self.engine.stop()


@pytest.fixture(scope="module")
def own(triton_installed: None, socket_folder: Path, tokenizer_folder: Path) -> Iterator[OwnStack]:
    stack = OwnStack(socket_folder, tokenizer_folder)
    yield stack
    stack.close()


class Reader(threading.Thread):
    """Reads one endless stream over HTTP."""

    def __init__(self, own: OwnStack) -> None:
        super().__init__(daemon=True)
        self._own = own
        self.events: list[dict[str, Any]] = []
        self.start()
        wait_until(lambda: self.events, why="a first event")

    def run(self) -> None:
        with suppress(OSError):  # the server is ended under it
            for event in self._own.triton.generate_stream(**ENDLESS, stream=True):
                self.events.append(event)

    @property
    def error(self) -> str:
        self.join(60)
        assert not self.is_alive()
        return str(self.events[-1].get("error"))


def test_more_than_max_requests_are_refused(own: OwnStack) -> None:
    own.engine.paused.set()
    try:
        before = len(own.engine.submitted)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(own.triton.generate, text_input="abc", max_tokens=3) for _ in range(2)]
            wait_until(lambda: len(own.engine.submitted) - before == 2)
            status, answer = own.triton.generate(text_input="abc", max_tokens=3)
            assert status >= 400 and answer["error"].startswith("overloaded: 2 requests are under way"), answer
            own.engine.paused.clear()
            assert [future.result()[0] for future in waiting] == [200, 200]
    finally:
        own.engine.paused.clear()
    assert own.answers()


def test_the_frontend_is_killed_and_started_again(own: OwnStack) -> None:
    reader = Reader(own)
    own.frontend.end()
    assert "the Splash-TRT frontend went away; send the request again" in reader.error
    status, answer = own.triton.generate(text_input="abc")
    assert status >= 400 and "no connection to the Splash-TRT frontend" in answer["error"]
    own.frontend = own.start_frontend()
    wait_until(own.answers, why="the connection's coming back by itself")


def test_the_frontend_ends_in_order(own: OwnStack) -> None:
    reader = Reader(own)
    own.frontend.process.terminate()
    assert own.frontend.wait_for_exit() == 0
    assert "the server is shutting down" in reader.error
    own.frontend.end()
    own.frontend = own.start_frontend()
    wait_until(own.answers)


def test_the_engine_is_started_anew(own: OwnStack) -> None:
    reader = Reader(own)
    own.engine.send(ready_message(400, incarnation="second"))
    assert "the engine was started anew" in reader.error
    own.engine.send(ready_message(400))
    wait_until(own.answers)


def test_unloading_waits_for_streams_and_then_ends(own: OwnStack) -> None:
    """Triton lets those under way finish before it ends the program."""
    results: list[str] = []

    def ask() -> None:
        events = own.triton.generate_stream(text_input="abc", max_tokens=100, stream=True)
        results.append("".join(event["text_output"] for event in events))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    with grpc_client.InferenceServerClient(own.triton.grpc_url) as client:
        client.unload_model("splash")
        thread.join(60)
        assert results == [echo("abc", 100)]
        with pytest.raises(InferenceServerException):
            client.load_model("absent")
        client.load_model("splash")
    wait_until(own.answers)


def test_triton_is_started_again(own: OwnStack) -> None:
    """It waits for what is under way."""
    with ThreadPoolExecutor(1) as pool:
        before = len(own.engine.submitted)
        answer = pool.submit(own.triton.generate, text_input="abc", max_tokens=100)
        wait_until(lambda: len(own.engine.submitted) > before)
        assert own.triton.stop() == 0
        assert answer.result()[1]["text_output"] == "abc" + echo("abc", 100)
    own.triton.close()
    own.triton = own.start_triton()
    wait_until(own.answers)


def test_a_dead_program_is_replaced_by_unload_and_load(own: OwnStack) -> None:
    """Triton goes on saying that the model is ready, tells those under way nothing, and does nothing about it."""
    before = len(own.engine.submitted)
    reader = Reader(own)
    own.triton.stub().kill()
    [request] = own.engine.submitted[before:]
    wait_until(lambda: request.id in own.engine.cancelled, why="the engine's being told")
    assert own.triton.ask("GET", "/v2/models/splash/ready")[0] == 200
    status, answer = own.triton.generate(text_input="abc", max_tokens=3)
    assert status >= 400 and "is not healthy" in answer["error"]
    with grpc_client.InferenceServerClient(own.triton.grpc_url) as client:
        client.unload_model("splash")
        client.load_model("splash")
        assert client.is_model_ready("splash")
    wait_until(own.answers, why="the new program's answer")
    assert reader.is_alive() and "error" not in reader.events[-1]
