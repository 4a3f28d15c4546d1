"""A model for planning: its sizes alone, without weights."""

from __future__ import annotations

from pathlib import Path

from splash_trt.models.config import ModelConfig
from splash_trt.models.families import MAX_CONFIG_BYTES, parse_config
from splash_trt.weights.json_file import read_json_object

QUANTISATION = "quantization_config"


def load_for_planning(path: Path) -> tuple[ModelConfig, bool]:
    """The model of a config.json, or of the folder that holds one, and whether its checkpoint is quantised.

    How it is quantised is not followed: config.Formats says what numbers are stored as. ValueError as load_config.
    """
    file = path / "config.json" if path.is_dir() else path
    data = read_json_object(file, max_bytes=MAX_CONFIG_BYTES)
    quantised = bool(data.pop(QUANTISATION, None))
    return parse_config(data, where=str(file)), quantised
