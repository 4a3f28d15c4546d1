"""model.py against a stand-in of Triton's module that holds it to the rules, and a frontend that can misbehave."""

from __future__ import annotations

import enum
import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zmq

from splash_trt.triton_backend.repository import connection, protocol
from splash_trt.triton_backend.repository.protocol import Cancel, Event, Failure, Frames, Generate, Hello, Welcome
from tests.e2e.servers import wait_until

MODULE = "triton_python_backend_utils"
MODEL = "splash_trt.triton_backend.repository.model"
FINAL = 1


class Code(enum.Enum):
    INTERNAL = enum.auto()
    INVALID_ARG = enum.auto()
    UNAVAILABLE = enum.auto()
    CANCELLED = enum.auto()


@dataclass
class TritonError:
    message: str
    code: Code = Code.INTERNAL


for _code in Code:
    setattr(TritonError, _code.name, _code)


@dataclass
class Tensor:
    _name: str
    _value: Any

    def __post_init__(self) -> None:
        assert isinstance(self._value, np.ndarray), self._name

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._value


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


class Logger:
    @staticmethod
    def log_info(message: str) -> None:
        assert isinstance(message, str)


class Sender:
    """Triton's rules: one final flag, nothing after it, and here one thread at a time as model.py promises."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.finals = 0
        self.cancelled = False
        self.threads: set[str] = set()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert self.finals == 0, "a response after the final one"
        assert response is not None or flags == FINAL
        self.threads.add(threading.current_thread().name)
        if response is not None:
            self.responses.append(response)
        self.finals += flags == FINAL

    def is_cancelled(self) -> bool:
        assert self.finals == 0, "asked after the final response"
        return self.cancelled

    @property
    def text(self) -> str:
        tensors = [t for r in self.responses for t in r.output_tensors if t.name() == "text_output"]
        return b"".join(tensor.as_numpy()[0] for tensor in tensors).decode()

    @property
    def error(self) -> TritonError | None:
        return self.responses[-1].error if self.responses else None


class Request:
    def __init__(self, **values: Any) -> None:
        self.sender = Sender()
        self._values = {"text_input": np.array([b"Hi"], object), **values}

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, value) for name, value in self._values.items()]

    def parameters(self) -> str:
        return "{}"

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Sender:
        return self.sender


class Frontend:
    """The other end of the socket, driven by the test. incarnation: as it says in its Welcome."""

    def __init__(self, endpoint: str, incarnation: str = "first") -> None:
        self.incarnation = incarnation
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._client = b""

    def receive(self) -> protocol.ToFrontend:
        assert self._socket.poll(30_000), "nothing came"
        self._client, data = self._socket.recv_multipart()
        return protocol.decode_to_frontend(data)

    def silent(self) -> bool:
        return not self._socket.poll(200)

    def send(self, message: protocol.FromFrontend | bytes) -> None:
        data = message if isinstance(message, bytes) else protocol.encode(message)
        self._socket.send_multipart([self._client, data])

    def welcome(self, version: int = protocol.VERSION) -> None:
        assert isinstance(self.receive(), Hello)
        self.send(Welcome(self.incarnation, "echo", version))

    def request(self) -> Generate:
        message = self.receive()
        assert isinstance(message, Generate), message
        return message

    def tell(self, *events: Event, incarnation: str | None = None) -> None:
        self.send(Frames(incarnation or self.incarnation, events))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    stand_in = ModuleType(MODULE)
    for value in (Tensor, InferenceResponse, TritonError, Logger):
        setattr(stand_in, value.__name__, value)
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, stand_in)
    monkeypatch.delitem(sys.modules, MODEL, raising=False)
    yield importlib.import_module(MODEL)
    sys.modules.pop(MODEL, None)


@pytest.fixture
def endpoint(socket_folder: Path) -> str:
    return f"ipc://{socket_folder}/model-{time.monotonic_ns()}"


class Running:
    """The model, loaded, and the frontend that it found."""

    def __init__(self, module: ModuleType, endpoint: str, max_requests: int = 4) -> None:
        self.endpoint = endpoint
        self.frontend = Frontend(endpoint)
        self.model = module.TritonPythonModel()
        strings = {"endpoint": endpoint, "max_requests": str(max_requests)}
        parameters = {name: {"string_value": value} for name, value in strings.items()}
        config = {"name": "splash", "max_batch_size": 0, "parameters": parameters}
        self.model.initialize({"model_config": json.dumps(config)})

    def connected(self) -> Running:
        self.frontend.welcome()
        wait_until(lambda: self.model._connection._incarnation is not None)
        return self

    def execute(self, **values: Any) -> Sender:
        request = Request(**values)
        assert self.model.execute([request]) is None
        return request.sender

    def stream(self) -> tuple[Sender, Generate]:
        sender = self.execute(stream=np.array([True]))
        return sender, self.frontend.request()

    def close(self) -> None:
        self.model.finalize()
        self.frontend.close()


@pytest.fixture
def running(model_module: ModuleType, endpoint: str) -> Iterator[Running]:
    running = Running(model_module, endpoint)
    yield running
    running.close()


def ended(sender: Sender) -> Sender:
    wait_until(lambda: sender.finals, why="the final response")
    return sender


def test_a_stream_and_its_end(running: Running) -> None:
    sender, request = running.connected().stream()
    assert json.loads(request.body) == {"prompt": "Hi"} and request.stream and request.deadline_s is None
    running.frontend.tell(Event(request.id, "a"))
    wait_until(lambda: sender.text == "a")
    assert sender.finals == 0
    running.frontend.tell(Event(request.id, "b", finish="stop"))
    assert ended(sender).text == "ab" and sender.error is None
    assert sender.threads == {"splash connection"}
    running.frontend.tell(Event(request.id, "c"))  # nobody waits for it any more
    assert running.stream()[1].id != request.id


def test_one_answer_is_one_response(running: Running) -> None:
    running.connected()
    sender = running.execute()
    request = running.frontend.request()
    assert not request.stream
    running.frontend.tell(Event(request.id, "ab", finish="length"))
    assert ended(sender).text == "Hiab" and len(sender.responses) == 1


def test_what_comes_together_is_one_response(running: Running) -> None:
    """It costs Triton as much as a single token: so a slow Triton gets longer pieces instead of a longer queue."""
    sender, request = running.connected().stream()
    frames = Frames("first", (Event(request.id, "a"), Event(request.id, "b"), Event(request.id, "c", finish="stop")))
    running.frontend.send(frames)
    assert ended(sender).text == "abc" and len(sender.responses) == 1


def test_frames_of_an_older_frontend_are_dropped(running: Running) -> None:
    sender, request = running.connected().stream()
    running.frontend.tell(Event(request.id, "old", finish="stop"), incarnation="zeroth")
    running.frontend.send(b"\xc1 no message")
    running.frontend.tell(Event(request.id, "new", finish="stop"))
    assert ended(sender).text == "new"


def test_a_frontend_that_comes_back(running: Running) -> None:
    sender, _ = running.connected().stream()
    running.frontend.close()
    assert ended(sender).error == TritonError(
        "the Splash-TRT frontend went away; send the request again", Code.UNAVAILABLE
    )
    refused = running.execute()
    assert refused.finals == 1 and refused.error is not None and refused.error.code is Code.UNAVAILABLE
    assert "no connection to the Splash-TRT frontend" in refused.error.message
    running.frontend = Frontend(running.endpoint, "second")
    sender, request = running.connected().stream()
    running.frontend.tell(Event(request.id, "again", finish="stop"))
    assert ended(sender).text == "again"


def test_another_frontend_on_the_same_connection(running: Running) -> None:
    """As through a proxy that keeps connections open: the incarnation alone tells."""
    sender, _ = running.connected().stream()
    running.frontend.send(Welcome("second", "echo"))
    error = ended(sender).error
    assert error is not None and "started anew" in error.message and error.code is Code.UNAVAILABLE


def test_a_frontend_of_another_version(running: Running) -> None:
    running.frontend.welcome(version=99)
    wait_until(lambda: "version 99" in running.model._connection._why)
    error = running.execute().error
    assert error is not None and "version 99" in error.message


def test_before_the_frontend_is_there(model_module: ModuleType, endpoint: str) -> None:
    running = Running(model_module, endpoint)
    try:
        error = running.execute().error
        assert error is not None and f"nothing has answered at {endpoint} yet" in error.message
    finally:
        running.close()


def test_more_than_max_requests(running: Running) -> None:
    streams = [running.connected().stream(), *(running.stream() for _ in range(3))]
    refused = running.execute()
    assert refused.error == TritonError(
        "overloaded: 4 requests are under way, and max_requests is that many", Code.UNAVAILABLE
    )
    running.frontend.tell(Event(streams[0][1].id, finish="stop"))
    ended(streams[0][0])
    assert running.stream()[0].finals == 0


def test_cancelling(running: Running) -> None:
    sender, request = running.connected().stream()
    sender.cancelled = True
    assert running.frontend.receive() == Cancel(request.id)
    error = ended(sender).error
    assert error is not None and error.code is Code.CANCELLED
    running.frontend.tell(Event(request.id, "late", finish="stop"))
    assert running.frontend.silent() and sender.text == ""


def test_a_deadline_that_the_frontend_misses(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LATE_S", 0.1)
    running.connected()
    sender = running.execute(text_input=np.array([b"Hi"], object))
    running.frontend.request()
    assert running.frontend.silent() and not sender.finals, "without a deadline it waits"

    class Timed(Request):
        def timeout(self) -> int:
            return 100_000

    timed = Timed()
    running.model.execute([timed])
    request = running.frontend.request()
    assert request.deadline_s == 0.1
    assert running.frontend.receive() == Cancel(request.id)
    error = ended(timed.sender).error
    assert error is not None and "timeout: " in error.message


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, Code.INVALID_ARG),
        (413, Code.INVALID_ARG),
        (429, Code.UNAVAILABLE),
        (503, Code.UNAVAILABLE),
        (500, Code.INTERNAL),
        (504, Code.CANCELLED),
    ],
)
def test_failures(running: Running, status: int, code: Code) -> None:
    running.connected()
    sender = running.execute(random_seed=np.array([3]))
    request = running.frontend.request()
    running.frontend.tell(Event(request.id, failure=Failure(status, "seed: why", "seed")))
    assert ended(sender).error == TritonError("random_seed: why", code)


def test_what_is_wrong_is_answered_at_once(running: Running) -> None:
    sender = running.execute(beam_width=np.array([2]))
    assert sender.error == TritonError("beam_width: 2 is not served; it must be 1", Code.INVALID_ARG)
    assert sender.finals == 1


def test_unloading_ends_what_is_under_way(model_module: ModuleType, endpoint: str) -> None:
    running = Running(model_module, endpoint)
    sender, request = running.connected().stream()
    running.model.finalize()
    error = sender.error
    assert sender.finals == 1 and error is not None and error.message == "the model is being unloaded"
    assert running.frontend.receive() == Cancel(request.id)
    late = running.execute()
    assert late.error is not None and late.error.message == "the model is being unloaded"
    running.frontend.close()


def test_many_from_many_threads(model_module: ModuleType, endpoint: str) -> None:
    running = Running(model_module, endpoint, max_requests=400).connected()
    senders: list[Sender] = []

    def ask() -> None:
        for _ in range(50):
            senders.append(running.execute(stream=np.array([True])))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    ids = [running.frontend.request().id for _ in range(400)]
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 400
    for piece in ("a", "b"):
        running.frontend.tell(*(Event(name, piece, finish="stop" if piece == "b" else None) for name in ids))
    wait_until(lambda: all(sender.finals for sender in senders))
    assert {sender.text for sender in senders} == {"ab"}
    assert running.model._connection._num_requests == 0
    running.close()
