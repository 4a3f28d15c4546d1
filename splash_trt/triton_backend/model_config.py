"""The inputs and outputs of Triton's model, and the config.pbtxt that declares them."""

from __future__ import annotations

import json
from dataclasses import dataclass

ONE, ANY, LIST = (1,), (-1,), (-1, -1)


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, Triton's type, and its dimensions without a leading axis (-1: any number)."""

    name: str
    kind: str
    dims: tuple[int, ...] = ONE


INPUTS = (
    TensorSpec("text_input", "TYPE_STRING"),
    TensorSpec("stream", "TYPE_BOOL"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL"),
    # Those of Triton's vLLM backend.
    TensorSpec("sampling_parameters", "TYPE_STRING"),
    TensorSpec("return_finish_reason", "TYPE_BOOL"),
    TensorSpec("return_cumulative_logprob", "TYPE_BOOL"),
    TensorSpec("return_logprobs", "TYPE_BOOL"),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL"),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL"),
    # Those of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls`.
    TensorSpec("max_tokens", "TYPE_INT32"),
    TensorSpec("min_tokens", "TYPE_INT32"),
    TensorSpec("min_length", "TYPE_INT32"),
    TensorSpec("end_id", "TYPE_INT32"),
    TensorSpec("pad_id", "TYPE_INT32"),
    TensorSpec("stop_words", "TYPE_STRING", ANY),
    TensorSpec("bad_words", "TYPE_STRING", ANY),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("top_k", "TYPE_INT32"),
    TensorSpec("top_p", "TYPE_FP32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("random_seed", "TYPE_UINT64"),
    TensorSpec("repetition_penalty", "TYPE_FP32"),
    TensorSpec("presence_penalty", "TYPE_FP32"),
    TensorSpec("frequency_penalty", "TYPE_FP32"),
    TensorSpec("length_penalty", "TYPE_FP32"),
    TensorSpec("beam_width", "TYPE_INT32"),
    TensorSpec("num_return_sequences", "TYPE_INT32"),
    TensorSpec("return_log_probs", "TYPE_BOOL"),
    TensorSpec("return_context_logits", "TYPE_BOOL"),
    TensorSpec("return_generation_logits", "TYPE_BOOL"),
)
"""All but text_input are optional."""

OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", ANY),
    TensorSpec("finish_reason", "TYPE_STRING", ANY),
    TensorSpec("cumulative_logprob", "TYPE_FP32", ANY),
    TensorSpec("logprobs", "TYPE_STRING", ANY),
    TensorSpec("num_input_tokens", "TYPE_UINT32"),
    TensorSpec("num_output_tokens", "TYPE_UINT32", ANY),
    TensorSpec("cum_log_probs", "TYPE_FP32", ANY),
    TensorSpec("output_log_probs", "TYPE_FP32", LIST),
    TensorSpec("sequence_index", "TYPE_INT32"),
)

HEAD = """\
# Written by `splash-trt triton-repo`. The model in 1/ passes each request on to a running `splash-trt serve`.
name: {name}
backend: "python"
max_batch_size: {max_batch_size}
model_transaction_policy {{ decoupled: True }}
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
"""


def config_text(name: str, endpoint: str, max_requests: int, batched: bool) -> str:
    """config.pbtxt. batched: tensors have a leading axis of size 1, as with TensorRT-LLM's models."""
    # JSON quotes strings as protobuf's text format does.
    lines = [HEAD.format(name=json.dumps(name), max_batch_size=int(batched))]
    for key, value in (("endpoint", endpoint), ("max_requests", str(max_requests))):
        lines.append(f"parameters {{ key: {json.dumps(key)}, value: {{ string_value: {json.dumps(value)} }} }}\n")
    for spec in INPUTS:
        optional = "" if spec.name == "text_input" else ", optional: true"
        lines.append(f"input {{ {_fields(spec)}{optional} }}\n")
    lines += [f"output {{ {_fields(spec)} }}\n" for spec in OUTPUTS]
    return "".join(lines)


def _fields(spec: TensorSpec) -> str:
    dims = ", ".join(map(str, spec.dims))
    return f'name: "{spec.name}", data_type: {spec.kind}, dims: [ {dims} ]'
