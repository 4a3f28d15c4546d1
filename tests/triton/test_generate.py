"""Real Triton in front of a frontend whose engine echoes prompts: names of tensors, shapes of answers, errors."""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from tests.triton.conftest import Stack

PROMPT = "The quick brown fox"


def test_one_answer(stack: Stack) -> None:
    """The prompt comes before it, as with both backends, unless it is not wanted."""
    status, answer = stack.triton.generate(text_input="abc", max_tokens=6)
    assert (status, answer["text_output"]) == (200, "abcabcabc")
    status, answer = stack.triton.generate(text_input="abc", max_tokens=6, exclude_input_in_output=True)
    assert (status, answer["text_output"]) == (200, "abcabc")
    assert answer["model_name"] == "splash"


def test_a_stream(stack: Stack) -> None:
    events = list(stack.triton.generate_stream(text_input="abc", max_tokens=6, stream=True))
    assert len(events) > 1 and "".join(event["text_output"] for event in events) == "abcabc"


def test_characters_come_whole(stack: Stack) -> None:
    text = "né 🦊"
    events = list(stack.triton.generate_stream(text_input=text, max_tokens=3 * len(text.encode()), stream=True))
    assert all("\ufffd" not in event["text_output"] for event in events)
    assert "".join(event["text_output"] for event in events).startswith(text)


def test_as_clients_of_the_vllm_backend_ask(stack: Stack) -> None:
    sampling = {"max_tokens": "4", "temperature": "0", "top_k": -1, "logprobs": 2, "repetition_penalty": 1.0}
    status, answer = stack.triton.generate(
        text_input="abc",
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(sampling),
        return_finish_reason=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert status == 200, answer
    assert (answer["text_output"], answer["finish_reason"]) == ("abca", "length")
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (3, 4)
    assert answer["cumulative_logprob"] == pytest.approx(4 * -0.5)
    logprobs = json.loads(answer["logprobs"])
    assert len(logprobs) == 4 and len(logprobs[0]) == 2
    best = next(iter(logprobs[0].values()))
    assert best == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    # Without sampling_parameters, a request's parameters mean the same.
    status, answer = stack.triton.generate(text_input="abc", parameters={"max_tokens": 2, "temperature": 0.5})
    assert answer["text_output"] == "abcab"
    assert stack.engine.submitted[-1].sampling.temperature == 0.5


def test_as_clients_of_tensorrt_llm_ask(stack: Stack) -> None:
    status, answer = stack.triton.generate(
        text_input="abcdef",
        max_tokens=9,
        bad_words="",
        stop_words=["e", ""],
        end_id=2,
        pad_id=2,
        temperature=0.7,
        top_k=5,
        top_p=0,
        random_seed=7,
        beam_width=1,
        length_penalty=1,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        return_log_probs=True,
        return_context_logits=False,
        exclude_input_in_output=True,
    )
    assert status == 200, answer
    assert answer["text_output"] == "abcd" and answer["sequence_index"] == 0
    assert answer["cum_log_probs"] == pytest.approx(-2.5) and answer["output_log_probs"] == [-0.5] * 5
    sampling = stack.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.7, 5, 1.0, 7)
    assert sampling.ignore_eos and sampling.stop_token_ids == (2,)


def test_a_batch_axis(stack: Stack) -> None:
    """TensorRT-LLM's clients send it and expect it back."""
    values = {"text_input": np.array([["abc"]], object), "max_tokens": np.array([[4]], np.int32)}
    [(result, error)] = grpc_stream(stack, "batched", {**values, "return_log_probs": np.array([[True]])})
    assert error is None
    assert result.as_numpy("text_output").tolist() == [[b"abcabca"]]
    assert result.as_numpy("output_log_probs").shape == (1, 1, 4)


def test_a_grpc_stream(stack: Stack) -> None:
    values = {
        "text_input": np.array(["abc"], object),
        "stream": np.array([True]),
        "max_tokens": np.array([5], np.int32),
    }
    answers = grpc_stream(stack, "splash", {**values, "return_finish_reason": np.array([True])})
    assert all(error is None for _, error in answers)
    assert b"".join(result.as_numpy("text_output")[0] for result, _ in answers) == b"abcab"
    reasons = [result.as_numpy("finish_reason")[0] for result, _ in answers]
    assert reasons == [b"None"] * (len(answers) - 1) + [b"length"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature: "),
    ({"random_seed": 2**63}, "random_seed: "),
    ({"min_length": -1}, "min_length: "),
    ({"sampling_parameters": '{"top_p": 2}'}, "top_p: "),
    ({"sampling_parameters": "{"}, "sampling_parameters: this is not JSON"),
    ({"sampling_parameters": '{"temprature": 1}'}, "temprature: "),
    ({"sampling_parameters": '{"prompt": "other"}'}, "prompt: it is no sampling parameter"),
    ({"stop_words": ["x" * 10000]}, "stop_words"),
    ({"bad_words": ["no"]}, "bad_words: "),
    ({"beam_width": 4}, "beam_width: 4 is not served"),
    ({"end_id": 4000}, "end_id: "),
    ({"text_input": ""}, "text_input: "),
    ({"text_input": "a" * 100_000}, "text_input: "),
    ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output: false"),
    ({"unknown": 1}, "unknown: "),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_what_a_client_gets_wrong_is_named(stack: Stack, fields: dict[str, Any], message: str) -> None:
    before = len(stack.engine.submitted)
    status, answer = stack.triton.generate(**{"text_input": "abc", "max_tokens": 4, **fields})
    assert status == 400 and answer["error"].startswith(message), answer
    events = list(stack.triton.generate_stream(**{"text_input": "abc", "max_tokens": 4, **fields}))
    assert len(events) == 1 and events[0]["error"].startswith(message)
    assert len(stack.engine.submitted) == before


def test_the_timeout_is_a_deadline(stack: Stack) -> None:
    """In microseconds, as Triton has it."""
    stack.engine.paused.set()
    try:
        status, answer = stack.triton.generate(text_input="abc", max_tokens=5, timeout=300_000)
        assert status == 400 and answer["error"] == "timeout: not complete within 0.3 s"
        values = {"text_input": np.array(["abc"], object)}
        [(result, error)] = grpc_stream(stack, "splash", values, timeout=300_000)
        assert result is None and "timeout: not complete within 0.3 s" in str(error)
        names = {request.id for request in stack.engine.submitted[-2:]}
    finally:
        stack.engine.paused.clear()
    assert stack.triton.generate(text_input="abc", max_tokens=5)[0] == 200
    assert names <= set(stack.engine.cancelled)


def test_the_http_client_of_triton(stack: Stack) -> None:
    """It can look at the model; inference it must leave to gRPC or the generate extension."""
    with http_client.InferenceServerClient(stack.triton.url) as client:
        assert client.is_model_ready("splash")
        names = {entry["name"]: entry for entry in client.get_model_metadata("splash")["inputs"]}
        assert names["text_input"]["shape"] == ["1"] or names["text_input"]["shape"] == [1]
        assert {"sampling_parameters", "max_tokens", "stop_words", "random_seed"} <= set(names)
        assert client.get_model_config("splash")["model_transaction_policy"] == {"decoupled": True}
        text = http_client.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array(["abc"], object))
        with pytest.raises(Exception, match="decoupled"):
            client.infer("splash", [text])


def grpc_stream(stack: Stack, model: str, values: dict[str, Any], **options: Any) -> list[tuple[Any, Any]]:
    """Every (result, error) of one request."""
    kinds = {"O": "BYTES", "b": "BOOL", "i": "INT32", "f": "FP32", "u": "UINT64"}
    inputs = []
    for name, value in values.items():
        inputs.append(grpc_client.InferInput(name, list(value.shape), kinds[value.dtype.kind]))
        inputs[-1].set_data_from_numpy(value)
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc_client.InferenceServerClient(stack.triton.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        collected = [answers.get(timeout=60)]
        while not _is_last(*collected[-1]):
            collected.append(answers.get(timeout=60))
    return collected


def _is_last(result: Any, error: Any) -> bool:
    return error is not None or result.get_response().parameters["triton_final_response"].bool_param
