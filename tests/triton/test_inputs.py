"""From Triton's input tensors to the request for the frontend, without Triton."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from splash_trt.triton_backend.repository.inputs import in_the_clients_words, read
from splash_trt.triton_backend.repository.outputs import Answer
from splash_trt.triton_backend.repository.protocol import Event, Token


@dataclass
class Tensor:
    _name: str
    _value: Any

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._value


@dataclass
class Request:
    tensors: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)
    timeout_us: int = 0

    def inputs(self) -> list[Any]:
        return [Tensor(name, value) for name, value in self.tensors.items()]

    def parameters(self) -> str:
        return json.dumps(self.given)

    def timeout(self) -> int:
        return self.timeout_us


def request(given: dict[str, Any] | None = None, timeout_us: int = 0, **values: Any) -> Request:
    """Tensors as clients send them: one value each, or a list of strings."""
    tensors: dict[str, Any] = {"text_input": np.array([b"Hi"], object)}
    kinds = {bool: np.bool_, int: np.int32, float: np.float32}
    for name, value in values.items():
        if isinstance(value, list | str):
            strings = [value] if isinstance(value, str) else value
            tensors[name] = np.array([text.encode() for text in strings], object)
        else:
            tensors[name] = np.array([value], kinds[type(value)])
    return Request(tensors, given or {}, timeout_us)


def test_nothing_but_a_text() -> None:
    question = read(request())
    assert question.body == {"prompt": "Hi"}
    assert (question.stream, question.prefix, question.outputs, question.deadline_s) == (False, "Hi", frozenset(), None)


@pytest.mark.parametrize(
    ("stream", "exclude", "prefix"),
    [(False, None, "Hi"), (False, False, "Hi"), (False, True, ""), (True, None, ""), (True, True, "")],
)
def test_the_prompt_before_the_answer(stream: bool, exclude: bool | None, prefix: str) -> None:
    given: dict[str, Any] = {} if exclude is None else {"exclude_input_in_output": exclude}
    assert read(request(stream=stream, **given)).prefix == prefix


def test_a_float_means_what_its_decimals_say() -> None:
    assert read(request(temperature=0.7, top_p=0.95)).body == {"prompt": "Hi", "temperature": 0.7, "top_p": 0.95}


def test_who_wins() -> None:
    """Tensor over sampling_parameters over request parameters."""
    sampling = json.dumps({"max_tokens": 2, "temperature": 0.5})
    body = read(request({"max_tokens": 1, "temperature": 0.1, "min_p": 0.1}, sampling_parameters=sampling)).body
    assert body == {"prompt": "Hi", "max_tokens": 2, "temperature": 0.5, "min_p": 0.1}
    assert read(request(sampling_parameters=sampling, max_tokens=3)).body["max_tokens"] == 3


def test_numbers_written_as_strings() -> None:
    sampling = json.dumps({"max_tokens": "7", "temperature": "0.25", "ignore_eos": "True", "stop": "12"})
    body = read(request(sampling_parameters=sampling)).body
    assert body == {"prompt": "Hi", "max_tokens": 7, "temperature": 0.25, "ignore_eos": True, "stop": "12"}


def test_what_asks_for_nothing_is_left_out() -> None:
    sampling = {"n": 1, "best_of": None, "top_k": -1, "repetition_penalty": 1.0, "skip_special_tokens": True}
    sampling |= {"stop": [], "bad_words": [], "min_tokens": 0, "logit_bias": {}, "use_beam_search": False}
    tensors: dict[str, Any] = {
        "beam_width": 1,
        "length_penalty": 0.0,
        "bad_words": [""],
        "stop_words": [""],
        "top_p": 0.0,
    }
    assert read(request(sampling_parameters=json.dumps(sampling), **tensors)).body == {"prompt": "Hi"}


def test_the_end_token() -> None:
    """TensorRT-LLM's replaces the model's own; -1: there is none."""
    question = read(request(end_id=5, sampling_parameters='{"stop_token_ids": [4]}'))
    assert question.body["stop_token_ids"] == [4, 5] and question.body["ignore_eos"] is True
    body = read(request(end_id=-1)).body
    assert body["ignore_eos"] is True and "stop_token_ids" not in body


def test_log_probabilities_are_asked_for_when_an_output_needs_them() -> None:
    assert read(request(return_cumulative_logprob=True)).body["logprobs"] == 0
    assert read(request(return_log_probs=True, sampling_parameters='{"logprobs": 3}')).body["logprobs"] == 3
    assert "logprobs" not in read(request(return_logprobs=True, return_log_probs=False)).body


def test_triton_s_timeout() -> None:
    assert read(request(timeout_us=1_500_000)).deadline_s == 1.5
    assert read(request({"timeout": 250_000})).deadline_s == 0.25
    with pytest.raises(ValueError, match="timeout: 'soon' is not allowed"):
        read(request({"timeout": "soon"}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(sampling_parameters="[1]"), "sampling_parameters: it must be a JSON object"),
        (request(sampling_parameters='{"temperature": NaN}'), "sampling_parameters: this is not JSON"),
        (request(sampling_parameters='{"n": 2}'), "n: 2 is not served; it must be 1"),
        (request(sampling_parameters='{"echo": true}'), "echo: it is no sampling parameter"),
        (request({"model": "other"}), "model: it is no sampling parameter"),
        (request(temperature=float("nan")), "temperature: nan is not allowed"),
        (request(beam_width=2), "beam_width: 2 is not served; it must be 1"),
        (request(return_context_logits=True), "return_context_logits: True is not served"),
        (request(bad_words=["no"]), r"bad_words: \['no'\] is not served"),
        (request(stream=True, exclude_input_in_output=False), "exclude_input_in_output: false is not allowed"),
        (Request({}), "text_input: it must have one value"),
        (Request({"text_input": np.array([b"a", b"b"], object)}), "text_input: it must have one value"),
        (Request({"text_input": np.array([b"\xff"], object)}), "text_input: this is not UTF-8"),
        (Request({**request().tensors, "top_k": np.array([1, 2])}), "top_k: 2 values are not allowed"),
    ],
)
def test_refusals(wrong: Request, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read(wrong)


def test_errors_name_the_field_as_the_client_did() -> None:
    names = read(request(random_seed=1, stop_words=["x"], min_length=2)).names
    assert in_the_clients_words("seed: -1 is not allowed", "seed", names) == "random_seed: -1 is not allowed"
    assert in_the_clients_words("stop: too many", "stop", names) == "stop_words: too many"
    assert in_the_clients_words("stop[1]: too long", "stop[1]", names) == "stop_words[1]: too long"
    assert in_the_clients_words("top_p: 2", "top_p", names) == "top_p: 2"
    assert in_the_clients_words("no room", None, names) == "no room"
    assert in_the_clients_words("too long", "prompt", names) == "text_input: too long"


def test_an_answer_as_it_grows() -> None:
    flags = {"return_num_output_tokens": True, "return_finish_reason": True, "return_cumulative_logprob": True}
    answer = Answer(read(request(stream=True, **flags)))
    answer.add([Event("a", num_tokens=1, logprobs=(Token(1, "x", -0.5),))])
    assert not answer.has_news  # its text is held back
    answer.add([Event("a", text="xy", num_tokens=1, logprobs=(Token(2, "y", -0.25),))])
    assert answer.has_news and not answer.complete
    first = answer.take()
    assert first["text_output"].tolist() == [b"xy"] and first["finish_reason"].tolist() == [b"None"]
    assert first["num_output_tokens"].tolist() == [2] and first["cumulative_logprob"].tolist() == [-0.75]
    assert not answer.has_news
    answer.add([Event("a", text="z", num_tokens=1, logprobs=(Token(3, "z", -1.0),), finish="stop")])
    last = answer.take()
    assert answer.complete and last["finish_reason"].tolist() == [b"stop"]
    assert last["num_output_tokens"].tolist() == [1] and last["cumulative_logprob"].tolist() == [-1.75]


def test_log_probabilities_in_json() -> None:
    answer = Answer(read(request(return_logprobs=True, sampling_parameters='{"logprobs": 1}')))
    answer.add([Event("a", "x", 1, (Token(1, "x", -2.0, ((5, "y", -0.1),)),), finish="length")])
    [shown] = json.loads(answer.take()["logprobs"][0])
    assert shown == {
        "1": {"logprob": -2.0, "rank": None, "decoded_token": "x"},
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": "y"},
    }
