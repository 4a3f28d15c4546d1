"""A model for planning: its sizes alone, without weights."""

from __future__ import annotations

import os
from pathlib import Path

from splash_trt.models.config import ModelConfig
from splash_trt.models.families import MAX_CONFIG_BYTES, parse_config
from splash_trt.weights.json_file import read_json_object

QUANTISATION = "quantization_config"
EXPECTED = (
    "give a model's config.json, or a folder that holds one: the file lies beside the weights in a Hugging Face "
    "repository, and is all that planning needs"
)


def load_for_planning(path: Path) -> tuple[ModelConfig, bool]:
    """The model of a config.json, or of the folder that holds one, and whether its checkpoint is quantised.

    How it is quantised is ignored: config.Formats says in which formats numbers are stored. ValueError says what is
    wrong with the file, and what is expected.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):
        what = "holds no config.json" if file is not path else "is neither a file nor a folder"
        raise ValueError(f"model: {path} {what}; {EXPECTED}")
    try:
        data = read_json_object(file, max_bytes=MAX_CONFIG_BYTES)
    except ValueError as error:
        raise ValueError(f"model: {error}; {EXPECTED}") from error
    if "model_type" not in data:
        raise ValueError(f"model: {file}: has no model_type, so it is no model's configuration; {EXPECTED}")
    quantised = bool(data.pop(QUANTISATION, None))
    return parse_config(data, where=f"model: {file}"), quantised
