"""A Hugging Face folder's safetensors files as a WeightSource. Other formats are refused: pickles can run code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from splash_trt.models.config import ModelConfig
from splash_trt.weights.hf_forms import Form, form_of
from splash_trt.weights.json_file import read_json_object
from splash_trt.weights.spec import TensorSpec, tensor_specs

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000  # that of a model with 256 experts in each of 61 layers has 9 MB
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Checkpoint:
    """Reads model.safetensors in `folder`, or the shards that model.safetensors.index.json names.

    The constructor reads only the files' headers. It raises ValueError, naming file and tensor, for files that are
    missing, damaged or not safetensors; for tensors that the model needs, but which the files lack, or hold in another
    shape or as anything but floating-point numbers; and for tensors that the model does not have. It skips layers
    after the model's last (for multi-token prediction), stored rotary frequencies, and a head if embeddings are tied.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self.model = model
        self.folder = folder
        self._files = _open_files(folder)
        self._check()

    def read(self, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        """Rows [begin, end) of the tensor along spec.axis, converted to out's dtype; see WeightSource."""
        assert 0 <= begin <= end <= spec.shape[spec.axis], (spec.name, begin, end)
        assert out.shape == (*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :]), (spec, out.shape)
        if begin < end:
            form_of(spec, self.model, self._files).read(self._slice, begin, end, out)

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def _check(self) -> None:
        needed = _needed(form_of(spec, self.model, self._files) for spec in tensor_specs(self.model))
        missing = [name for name in needed if name not in self._files]
        if missing:
            raise ValueError(
                f"{self.folder}: the checkpoint lacks {_listed(missing)}, which by config.json it should have; the "
                f"shape of {missing[0]} should be {list(needed[missing[0]])}"
            )
        for name, shape in needed.items():
            found = self._slice(name)
            dtype = found.get_dtype()
            if dtype not in DTYPES:
                raise ValueError(
                    f"{self.folder}: {name} is stored as {dtype}; supported are {', '.join(DTYPES)}: quantised "
                    "checkpoints are not supported yet"
                )
            if tuple(found.get_shape()) != shape:
                raise ValueError(
                    f"{self.folder}: {name} has the shape {found.get_shape()}, but by config.json it should have "
                    f"{list(shape)}"
                )
        unexpected = [name for name in self._files if name not in needed and not self._skipped(name)]
        if unexpected:
            raise ValueError(
                f"{self.folder}: the checkpoint holds {_listed(unexpected)}, which a {self.model.model_type} model of "
                "this config.json does not have"
            )

    def _skipped(self, name: str) -> bool:
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= self.model.num_layers:
            return True
        return name.endswith("rotary_emb.inv_freq") or (self.model.tied_embeddings and name == "lm_head.weight")


def _needed(forms: Iterable[Form]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for form in forms:
        found.update(form.shapes())
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _open_files(folder: Path) -> dict[str, Any]:
    """{tensor name: open file that holds it}. If there is both a single file and an index, the single file is read, as
    in transformers."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder; give the folder that holds the model's safetensors files")
    if (folder / SINGLE_FILE).exists():
        handle = _open(folder / SINGLE_FILE)
        return dict.fromkeys(handle.keys(), handle)
    if (folder / INDEX_FILE).exists():
        return _open_shards(folder, _weight_map(folder / INDEX_FILE))
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ValueError(
            f"{folder}: has no safetensors, only {_listed(pickles)}: pickles can run code and are never read; convert "
            f"the checkpoint to {SINGLE_FILE}"
        )
    raise ValueError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _weight_map(path: Path) -> dict[str, str]:
    """{tensor name: file name}; each file name is a path that stays inside the index's folder."""
    weight_map = read_json_object(path, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be an object from tensor names to file names, not empty")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise ValueError(f"{path}: weight_map[{name!r}] is {file_name!r}; it must name a .safetensors file")
        # Only the path's text is checked: download caches keep the files as links that lead out of the folder.
        parts = PurePosixPath(file_name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in file_name or "\0" in file_name:
            raise ValueError(f"{path}: weight_map[{name!r}] is {file_name!r}, which leads out of the model's folder")
    return weight_map


def _open_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, Any]:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: {INDEX_FILE} names {_listed(missing)}, not there")
    files = {name: _open(folder / name) for name in names}
    held = {name: frozenset(handle.keys()) for name, handle in files.items()}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise ValueError(f"{folder / name}: lacks {tensor}, which {INDEX_FILE} says it holds")
    for name in names:
        strays = sorted(tensor for tensor in held[name] if weight_map.get(tensor) != name)
        if strays:
            raise ValueError(f"{folder / name}: holds {_listed(strays)}, which {INDEX_FILE} does not place there")
    return {tensor: files[name] for tensor, name in weight_map.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path}: is damaged, cut short or no safetensors file: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened: {error}") from error
