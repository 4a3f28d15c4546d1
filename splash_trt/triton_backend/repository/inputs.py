"""From a Triton request's tensors and parameters to what the frontend is asked, in the names of /v1/completions.

The tensors are those of the vLLM backend and of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls`, in one request mixed
as one likes. Where they say the same, the tensor wins over `sampling_parameters`, and both over request parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MICROSECONDS = 1_000_000


class Tensor(Protocol):
    """pb_utils.Tensor, as far as it is used here."""

    def name(self) -> str: ...

    def as_numpy(self) -> Any: ...


class TritonRequest(Protocol):
    """pb_utils.InferenceRequest likewise. parameters: JSON; timeout: microseconds, 0 for none."""

    def inputs(self) -> list[Tensor]: ...

    def parameters(self) -> str: ...

    def timeout(self) -> int: ...


@dataclass(frozen=True)
class Question:
    """One request as the client means it."""

    body: dict[str, Any]
    """Fields of /v1/completions."""
    stream: bool
    prefix: str
    """What the answer's text begins with: the prompt or nothing."""
    outputs: frozenset[str]
    """Names of the outputs asked for beside the text."""
    deadline_s: float | None
    names: dict[str, str]
    """Field of the body -> the client's name for it, where that is another one."""


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
"""Tensor -> field of the body. TensorRT-LLM renamed two of them; both names are taken."""

FLAGS = {
    "return_finish_reason": ("finish_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
"""Tensor -> outputs that it asks for."""

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
"""Values that ask for nothing, which clients send unasked; null does so for every field."""

REFUSED = frozenset(NEUTRAL) - {
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "min_p", "logit_bias"),
    *("stop", "stop_token_ids"),
}
"""Fields of which any other value is refused here; the frontend judges the rest."""

FIXED = ("prompt", "model", "stream", "stream_options", "echo", "suffix", "return_token_ids", "user")
"""Fields of the body that are not the client's to set."""

OF_TRITON = ("timeout", "id", "sequence_id", "sequence_start", "sequence_end", "priority", "binary_data_output")
"""Request parameters that mean Triton itself."""

STRINGS = ("stop", "bad_words", "guided_decoding")  # every other parameter that comes as a string is JSON in it


def read(request: TritonRequest) -> Question:
    """ValueError, worded "name: what is wrong", for what this model cannot take."""
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
    """Both backends put the prompt before an answer in one piece unless told otherwise, and never before a stream."""
    exclude = bool(_scalar(tensors, "exclude_input_in_output", stream))
    if stream and not exclude:
        raise ValueError("exclude_input_in_output: false is not allowed with stream true; leave it out")
    return not exclude


def _deadline_s(request: TritonRequest, parameters: dict[str, Any]) -> float | None:
    """Triton's timeout, which is in microseconds; 0 is none."""
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
    if "end_id" in tensors:  # instead of the model's own; -1: none
        end = _scalar(tensors, "end_id", None)
        body["ignore_eos"] = True
        if end != -1:
            body["stop_token_ids"] = [*body.get("stop_token_ids", []), end]
            names["stop_token_ids"] = "end_id"


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """Without what asks for nothing."""
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
    """Clients of the vLLM backend write numbers as strings too."""
    if not isinstance(value, str) or name in STRINGS:
        return value
    try:
        return json.loads(value.lower(), parse_constant=_no_constant)
    except ValueError:
        return value


def _scalar(tensors: dict[str, Any], name: str, default: Any) -> Any:
    """The tensor's one value as Python has it."""
    if name not in tensors:
        return default
    values = tensors[name]
    if values.size != 1:
        raise ValueError(f"{name}: {values.size} values are not allowed; it must have one")
    if values.dtype.kind != "f":
        return values[0].item()
    if not np.isfinite(values[0]):
        raise ValueError(f"{name}: {values[0]} is not allowed; it must be a finite number")
    # 0.7 in 32 bits is meant as 0.7, which is what the same request over HTTP says.
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
    """The frontend's error with the field as this request called it. param: "seed", or "stop[0]" for a part of one."""
    field = (param or "").partition("[")[0]
    if field not in names:
        return message
    return names[field] + message.removeprefix(field) if message.startswith(field) else f"{names[field]}: {message}"
