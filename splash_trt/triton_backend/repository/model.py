"""The model that Triton's Python backend loads: each request becomes one of the frontend's, and its answer comes back.

`execute` does not wait: it passes the request to the connection's thread, which answers through the request's response
sender. So one instance can have any number of requests under way.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from .connection import CANCELLED, Connection, Refused
from .inputs import Question, in_the_clients_words, read
from .outputs import Answer
from .protocol import Event, Failure, Generate

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Parameters of config.pbtxt: endpoint, where the frontend listens for clients; max_requests under way at once."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        # If the model has a batch axis, Triton expects it in every output.
        self._lead = (1,) if config["max_batch_size"] else ()
        log = pb_utils.Logger
        self._connection = Connection(
            parameters["endpoint"],
            int(parameters["max_requests"]),
            lambda message: log.log_info(f"{config['name']}: {message}"),
        )
        self._connection.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                question = read(request)
            except ValueError as error:
                _send_failure(sender, Failure(400, str(error)))
                continue
            generate = Generate(
                uuid.uuid4().hex, json.dumps(question.body).encode(), question.stream, question.deadline_s
            )
            try:
                self._connection.submit(generate, Waiting(sender, question, self._lead))
            except Refused as refusal:
                _send_failure(sender, refusal.failure)

    def finalize(self) -> None:
        self._connection.close()


class Waiting:
    """One of Triton's requests under way."""

    def __init__(self, sender: Any, question: Question, lead: tuple[int, ...]) -> None:
        self._sender = sender
        self._names = question.names
        self._answer = Answer(question)
        self._lead = lead

    def deliver(self, events: list[Event]) -> bool:
        answer = self._answer
        answer.add(events)
        if answer.has_news:
            tensors = [
                pb_utils.Tensor(name, np.reshape(value, (*self._lead, *value.shape)))
                for name, value in answer.take().items()
            ]
            self._sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if answer.complete else 0)
        return answer.complete

    def fail(self, failure: Failure) -> None:
        words = in_the_clients_words(failure.message, failure.param, self._names)
        _send_failure(self._sender, Failure(failure.status, words))

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _send_failure(sender: Any, failure: Failure) -> None:
    error = pb_utils.TritonError(failure.message, _code(failure.status))
    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)


def _code(status: int) -> Any:
    """Triton's error code for an HTTP status."""
    errors = pb_utils.TritonError
    if status in (CANCELLED, 504):
        return errors.CANCELLED
    if status in (429, 503):
        return errors.UNAVAILABLE
    return errors.INVALID_ARG if status < 500 else errors.INTERNAL
