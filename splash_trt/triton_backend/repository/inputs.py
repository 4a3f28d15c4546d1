"""Makes a body of /v1/completions of a Triton request's tensors and parameters.

The tensors are those of the vLLM backend and of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls`; one request may mix
them. For the same field, a tensor takes precedence over `sampling_parameters`, and both over request parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MICROSECONDS = 1_000_000


class Tensor(Protocol):
    """The part of pb_utils.Tensor that is used here."""

    def name(self) -> str: ...

    def as_numpy(self) -> Any: ...


class TritonRequest(Protocol):
    """The part of pb_utils.InferenceRequest that is used here. parameters: JSON; timeout: microseconds, 0: none."""

    def inputs(self) -> list[Tensor]: ...

    def parameters(self) -> str: ...

    def timeout(self) -> int: ...


@dataclass(frozen=True)
class Question:
    """A Triton request, translated for the frontend."""

    body: dict[str, Any]
    """Fields of /v1/completions."""
    stream: bool
    prefix: str
    """What the answer's text begins with: the prompt, or nothing."""
    outputs: frozenset[str]
    """Names of the outputs that are asked for in addition to the text."""
    deadline_s: float | None
    names: dict[str, str]
    """{field of the body: the client's name for it}, where they differ."""


COPIED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "random_seed": "seed",
    "seed": "seed",
    "min_length": "min_tokens",
    "min_tokens": "min_tokens",
}
"""{tensor: field of the body}. TensorRT-LLM has renamed two of them; old and new names are taken."""

FLAGS = {
    "return_finish_reason": ("finish_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
"""{tensor: outputs that it asks for}."""

OF_CHOSEN = frozenset({"cumulative_logprob", "cum_log_probs", "output_log_probs"})
"""Outputs that need the log-probability of every chosen token."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (0, 1),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "min_p": (0,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "bad_words": ([], ""),
    "prompt_logprobs": (),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
}
"""Values that have no effect, which clients send all the same; so has null, for every field."""

REFUSED = frozenset(NEUTRAL) - {
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "min_p", "logit_bias"),
    *("stop", "stop_token_ids"),
}
"""Fields of which any other value is refused here; other fields are checked by the frontend."""

FIXED = ("prompt", "model", "stream", "stream_options", "echo", "suffix", "return_token_ids", "user")
"""Fields of the body that clients may not set."""

OF_TRITON = ("timeout", "id", "sequence_id", "sequence_start", "sequence_end", "priority", "binary_data_output")
"""Request parameters that are meant for Triton itself."""

STRINGS = ("stop", "bad_words", "guided_decoding")  # parameters that are strings; strings of others contain JSON


def read(request: TritonRequest) -> Question:
    """Translates a request. Raises ValueError, as "name: what is wrong", for what this model cannot take."""
    tensors = {tensor.name(): np.asarray(tensor.as_numpy()).reshape(-1) for tensor in request.inputs()}
    parameters = _object(request.parameters() or "{}", "parameters")
    prompt = _text(tensors, "text_input")
    stream = bool(_scalar(tensors, "stream", False))
    names = {"prompt": "text_input"}
    body = _sampling(tensors, parameters, names)
    body["prompt"] = prompt
    outputs = {output for flag, of_flag in FLAGS.items() if _scalar(tensors, flag, False) for output in of_flag}
    if outputs & OF_CHOSEN:
        body.setdefault("logprobs", 0)
    return Question(
        body=body,
        stream=stream,
        prefix=prompt if _wants_input(tensors, stream) else "",
        outputs=frozenset(outputs),
        deadline_s=_deadline_s(request, parameters),
        names=names,
    )


def _wants_input(tensors: dict[str, Any], stream: bool) -> bool:
    """Whether the answer is to begin with the prompt: by default, as in both backends, if it is not a stream."""
    exclude = bool(_scalar(tensors, "exclude_input_in_output", stream))
    if stream and not exclude:
        raise ValueError("exclude_input_in_output: false is not allowed with stream true; leave it out")
    return not exclude


def _deadline_s(request: TritonRequest, parameters: dict[str, Any]) -> float | None:
    """Triton's timeout in seconds; None if it is 0."""
    timeout = request.timeout() or parameters.get("timeout", 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 0:
        raise ValueError(f"timeout: {timeout!r} is not allowed; it must be a whole number of microseconds")
    return timeout / MICROSECONDS or None


def _sampling(tensors: dict[str, Any], parameters: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    body = {name: _number(name, value) for name, value in parameters.items() if name not in OF_TRITON}
    if "sampling_parameters" in tensors:
        given = _object(_text(tensors, "sampling_parameters"), "sampling_parameters")
        body.update({name: _number(name, value) for name, value in given.items()})
    for name in FIXED:
        if name in body:
            raise ValueError(f"{name}: it is no sampling parameter; leave it out")
    if body.get("top_k") == -1:  # vLLM's "off"
        del body["top_k"]
    for tensor, field in COPIED.items():
        if tensor in tensors:
            body[field] = _scalar(tensors, tensor, None)
            names[field] = tensor
    # TensorRT-LLM's "off" is 0, which for top_k is ours too.
    body.update({name: _scalar(tensors, name, 0) for name in ("top_k", "top_p") if name in tensors})
    if "top_p" in tensors and body["top_p"] == 0:
        del body["top_p"]
    body.update({name: _scalar(tensors, name, None) for name in REFUSED & set(tensors) - {"bad_words"}})
    _stops(tensors, body, names)
    return _checked(body)


def _stops(tensors: dict[str, Any], body: dict[str, Any], names: dict[str, str]) -> None:
    for tensor, field in (("stop_words", "stop"), ("bad_words", "bad_words")):
        if tensor in tensors:
            body[field] = [word for word in (_decoded(item, tensor) for item in tensors[tensor]) if word]
            names[field] = tensor
    if "end_id" in tensors:  # in place of the model's own end token; -1: none
        end = _scalar(tensors, "end_id", None)
        body["ignore_eos"] = True
        if end != -1:
            body["stop_token_ids"] = [*body.get("stop_token_ids", []), end]
            names["stop_token_ids"] = "end_id"


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """The body without values that have no effect. Raises ValueError for values that are not supported."""
    kept = {}
    for name, value in body.items():
        if value is None or value in NEUTRAL.get(name, ()):
            continue
        if name in REFUSED:
            allowed = " or ".join(map(str, NEUTRAL[name])) or "left out"
            raise ValueError(f"{name}: {value!r} is not served; it must be {allowed}")
        kept[name] = value
    return kept


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: this is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name}: it must be a JSON object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _number(name: str, value: Any) -> Any:
    """The value of a parameter: clients of the vLLM backend may write numbers as strings."""
    if not isinstance(value, str) or name in STRINGS:
        return value
    try:
        return json.loads(value.lower(), parse_constant=_no_constant)
    except ValueError:
        return value


def _scalar(tensors: dict[str, Any], name: str, default: Any) -> Any:
    """The tensor's single value, as a Python value."""
    if name not in tensors:
        return default
    values = tensors[name]
    if values.size != 1:
        raise ValueError(f"{name}: {values.size} values are not allowed; it must have one")
    if values.dtype.kind != "f":
        return values[0].item()
    if not np.isfinite(values[0]):
        raise ValueError(f"{name}: {values[0]} is not allowed; it must be a finite number")
    # The float32 nearest to 0.7 becomes 0.7, so that the same request over HTTP gives the same answer.
    return float(str(values[0]))


def _text(tensors: dict[str, Any], name: str) -> str:
    if name not in tensors or tensors[name].size != 1:
        raise ValueError(f"{name}: it must have one value")
    return _decoded(tensors[name][0], name)


def _decoded(value: Any, name: str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: this is not UTF-8: {error}") from None


def in_the_clients_words(message: str, param: str | None, names: dict[str, str]) -> str:
    """The frontend's error, with the client's name of the field. param: such as "seed", or "stop[0]" for a part."""
    field = (param or "").partition("[")[0]
    if field not in names:
        return message
    return names[field] + message.removeprefix(field) if message.startswith(field) else f"{names[field]}: {message}"
