"""Builds an engine from a checkpoint, one block of a tensor at a time, so that any model can be built in little memory.

The weights file is a safetensors file. It is written here because the library's writer needs all tensors in memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from io import FileIO
from pathlib import Path

import torch

from splash_engines.manifest import (
    DTYPES,
    MANIFEST,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    Origin,
    Part,
    Place,
    StoredFile,
    StoredTensor,
    checksum,
    encode,
)
from splash_engines.whole_folder import whole_folder, writing
from splash_trt.models.families import load_config
from splash_trt.models.runnable import refuse_unrunnable_model
from splash_trt.version import __version__
from splash_trt.weights.checkpoint import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, Checkpoint
from splash_trt.weights.hf_forms import form_of
from splash_trt.weights.json_file import read_json_object
from splash_trt.weights.spec import Cut, TensorSpec, tensor_specs

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
MARKERS = (MANIFEST, WEIGHTS)
"""A folder with these files is an engine's."""
CHUNK_BYTES = 1 << 20
"""Bytes that one checksum covers, rounded up to whole rows. A rank reads up to this much too much at each end of its
part."""
BLOCK_BYTES = 1 << 26
"""About how much of a tensor is in memory at a time."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done so far, and the bytes in all."""
Step = Callable[[str, int], None]
"""Called with what has been done and its bytes."""
ExtraFiles = Callable[[Path], list[StoredFile]]
"""Puts more files into the folder, and returns their entries for the manifest."""


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A tensor as a safetensors header describes it; `offset` is in bytes from the file's beginning."""

    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """A tensor that is copied into the engine's weights file."""

    spec: TensorSpec
    dtype: str

    @property
    def rows(self) -> int:
        return self.spec.shape[self.spec.axis]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.spec.shape) // self.rows * DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the file: the cut axis comes first."""
        shape, axis = self.spec.shape, self.spec.axis
        return (shape[axis], *shape[:axis], *shape[axis + 1 :])


class _Checkpoint:
    """A checkpoint's tensors, each with its file and its place in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.model = load_config(folder)
        refuse_unrunnable_model(self.model)
        self.config_checksum = checksum((folder / "config.json").read_bytes())
        self.source = Checkpoint(folder, self.model)  # refuses files that are damaged or not this model's
        names = [SINGLE_FILE]
        if not (folder / SINGLE_FILE).exists():
            weight_map = read_json_object(folder / INDEX_FILE, max_bytes=MAX_INDEX_BYTES)["weight_map"]
            names = sorted(set(weight_map.values()))
        self.files: list[StoredFile] = []
        self.tensors: dict[str, _Stored] = {}
        for index, name in enumerate(names):
            file, tensors = _read_header(folder / name, name, index)
            self.files.append(file)
            self.tensors.update(tensors)

    def dtype(self, spec: TensorSpec) -> str:
        """A dtype that holds every number of the tensor exactly; in the files it may be several tensors of several
        dtypes."""
        names = form_of(spec, self.model, self.tensors).shapes()
        found = reduce(torch.promote_types, (DTYPES[self.tensors[name].dtype] for name in names))
        return next(name for name, dtype in DTYPES.items() if dtype is found)


def build_engine(
    model_dir: Path,
    out: Path,
    *,
    self_contained: bool = False,
    overwrite: bool = False,
    extra_files: ExtraFiles | None = None,
    progress: Progress | None = None,
) -> None:
    """Builds the engine of the checkpoint in model_dir as the folder `out`.

    Unless self_contained, routed experts stay in the checkpoint, and the engine refers to them with checksums. With
    overwrite, an engine at `out` is replaced once the new one is complete. However the build ends (an exception, a
    kill), `out` is what it was before or a finished engine. What a killed build leaves behind is removed by the next
    build for the same `out`.
    Raises ValueError, naming the path and a remedy, for a wrong checkpoint, an `out` in use, and a disk that is full or
    must not be written.
    """
    checkpoint = _Checkpoint(model_dir)
    out = out.resolve()
    copied, referred = _divide(checkpoint, self_contained)
    with whole_folder(out, markers=MARKERS, overwrite=overwrite) as folder:
        _check_space(out, sum(item.num_bytes for item in copied))
        more = extra_files(folder) if extra_files else []
        manifest = _fill(folder, out, checkpoint, copied, referred, more, progress or (lambda what, done, total: None))
        with writing(folder / MANIFEST):
            (folder / MANIFEST).write_bytes(encode(manifest))


def _check_space(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if num_bytes > free:
        raise ValueError(
            f"{out}: the engine takes {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free there; free some, or "
            "choose another place with --out"
        )


def _divide(checkpoint: _Checkpoint, self_contained: bool) -> tuple[list[_Copied], list[TensorSpec]]:
    """(tensors that are copied, in the order of the weights file; experts' tensors that are referred to).

    Wide numbers come first: a safetensors file has no gaps, and each tensor must lie at a multiple of its item size.
    """
    specs = tensor_specs(checkpoint.model)
    referred = [spec for spec in specs if spec.cut is Cut.EXPERTS and not self_contained]
    copied = [_Copied(spec=spec, dtype=checkpoint.dtype(spec)) for spec in specs if spec not in referred]
    return sorted(copied, key=lambda item: -DTYPES[item.dtype].itemsize), referred


def _fill(
    folder: Path,
    out: Path,
    checkpoint: _Checkpoint,
    copied: Sequence[_Copied],
    referred: Sequence[TensorSpec],
    more: Sequence[StoredFile],
    progress: Progress,
) -> Manifest:
    """Writes everything of the engine into `folder` except its manifest, which is returned."""
    parts = {spec.name: _stored_of(spec, checkpoint) for spec in referred}
    total = sum(item.num_bytes for item in copied) + sum(part.num_bytes for found in parts.values() for part in found)
    done = 0

    def step(what: str, num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(what, done, total)

    weights, tensors = _write_weights(folder / WEIGHTS, copied, checkpoint.source, step)
    files, index = [weights], {}
    for file in sorted({part.file for found in parts.values() for part in found}):
        index[file] = len(files)
        files.append(checkpoint.files[file])
    for spec in referred:
        references = tuple(_refer(part, spec, parts[spec.name], checkpoint, index, step) for part in parts[spec.name])
        tensors[spec.name] = StoredTensor(name=spec.name, shape=spec.shape, parts=references)
    files += [*_copy_tokenizer(checkpoint.folder, folder), *more]
    return Manifest(
        built_with=__version__,
        model=checkpoint.model,
        origin=Origin(
            folder=str(checkpoint.folder),
            relative=os.path.relpath(checkpoint.folder, out),
            config_checksum=checkpoint.config_checksum,
        ),
        files=tuple(files),
        tensors=tuple(tensors[spec.name] for spec in tensor_specs(checkpoint.model)),
    )


def _write_weights(
    path: Path, copied: Sequence[_Copied], source: Checkpoint, step: Step
) -> tuple[StoredFile, dict[str, StoredTensor]]:
    header, offsets = _header(copied)
    tensors: dict[str, StoredTensor] = {}
    with writing(path):
        file = path.open("wb", buffering=0)
    with file:
        with writing(path):
            _write(file, memoryview(header))
        for item, offset in zip(copied, offsets, strict=True):
            part = _copy(item, offset, source, file, path, step)
            tensors[item.spec.name] = StoredTensor(name=item.spec.name, shape=item.spec.shape, parts=(part,))
    stored = StoredFile(
        name=WEIGHTS,
        place=Place.ENGINE,
        num_bytes=len(header) + sum(item.num_bytes for item in copied),
        checked_bytes=len(header),
        checksum=checksum(header),
    )
    return stored, tensors


def _copy(item: _Copied, offset: int, source: Checkpoint, file: FileIO, path: Path, step: Step) -> Part:
    """Appends a tensor to the weights file, block by block."""
    spec, chunk_rows = item.spec, _chunk_rows(item.rows, item.row_bytes)
    chunk_bytes = chunk_rows * item.row_bytes
    block = max(1, BLOCK_BYTES // chunk_bytes) * chunk_rows
    checksums: list[str] = []
    for begin in range(0, item.rows, block):
        end = min(begin + block, item.rows)
        shape = (*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :])
        rows = torch.empty(shape, dtype=DTYPES[item.dtype])
        source.read(spec, begin, end, rows)
        data = rows.movedim(spec.axis, 0).contiguous().view(-1).view(torch.uint8).numpy().data
        checksums += [checksum(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
        with writing(path):
            _write(file, data)
        step(f"copying {spec.name}", len(data))
    return Part(
        file=0, offset=offset, dtype=item.dtype, rows=item.rows, chunk_rows=chunk_rows, checksums=tuple(checksums)
    )


def _write(file: FileIO, data: memoryview) -> None:
    """Writes all of the data: one system call writes at most 2 GiB, and less when the disk is about to be full."""
    while data:
        data = data[file.write(data) :]


def _header(copied: Sequence[_Copied]) -> tuple[bytes, list[int]]:
    """A safetensors header, and each tensor's offset from the beginning of the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = [], 0
    for item in copied:
        end = at + item.rows * item.row_bytes
        entries[item.spec.name] = {"dtype": item.dtype, "shape": item.stored_shape, "data_offsets": (at, end)}
        offsets.append(at)
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 256)  # numbers begin at a multiple of 256 bytes
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + offset for offset in offsets]


def _chunk_rows(rows: int, row_bytes: int) -> int:
    """How many rows one checksum covers, of `rows` in all."""
    return min(rows, -(-CHUNK_BYTES // row_bytes))


def _stored_of(spec: TensorSpec, checkpoint: _Checkpoint) -> list[_Stored]:
    """The checkpoint's tensors that make up one of the experts' tensors, in the manifest's order."""
    form = form_of(spec, checkpoint.model, checkpoint.tensors)
    return [checkpoint.tensors[name] for name in form.shapes()]


def _refer(
    stored: _Stored,
    spec: TensorSpec,
    siblings: Sequence[_Stored],
    checkpoint: _Checkpoint,
    index: Mapping[int, int],
    step: Step,
) -> Part:
    """A reference to `stored`, one of the tensors in the checkpoint (siblings) that make up `spec`. index: the files'
    numbers in the manifest."""
    if len(siblings) == 1:
        rows = spec.shape[0]
        chunk_rows = _chunk_rows(rows, stored.num_bytes // rows)
    else:  # a tensor of one expert, which is always read whole
        rows = chunk_rows = stored.shape[0]
    chunk_bytes = chunk_rows * (stored.num_bytes // rows)
    path = checkpoint.folder / checkpoint.files[stored.file].name
    checksums = []
    with _reading(path), path.open("rb") as file:
        file.seek(stored.offset)
        for at in range(0, stored.num_bytes, chunk_bytes):
            size = min(chunk_bytes, stored.num_bytes - at)
            data = file.read(size)
            if len(data) < size:
                raise ValueError(f"{path}: was cut short while the engine was being built")
            checksums.append(checksum(data))
    step(f"checking {path.name}", stored.num_bytes)
    return Part(
        file=index[stored.file],
        offset=stored.offset,
        dtype=stored.dtype,
        rows=rows,
        chunk_rows=chunk_rows,
        checksums=tuple(checksums),
    )


def _copy_tokenizer(source: Path, folder: Path) -> list[StoredFile]:
    """Copies the tokenizer's files, those that exist. They are small and checked whole when an engine is opened."""
    stored = []
    for name in TOKENIZER_FILES:
        path = source / name
        if not path.is_file():
            continue
        with _reading(path):
            data = path.read_bytes()
        target = folder / TOKENIZER / name
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
        size = len(data)
        stored.append(
            StoredFile(
                name=f"{TOKENIZER}/{name}",
                place=Place.ENGINE,
                num_bytes=size,
                checked_bytes=size,
                checksum=checksum(data),
            )
        )
    return stored


def _read_header(path: Path, name: str, index: int) -> tuple[StoredFile, dict[str, _Stored]]:
    """Reads the header of a safetensors file. The library has accepted the file already, but does not tell offsets."""
    with _reading(path), path.open("rb") as file:
        begin = file.read(8)
        begin += file.read(int.from_bytes(begin, "little"))
        size = os.fstat(file.fileno()).st_size
    entries = json.loads(begin[8:])
    entries.pop("__metadata__", None)
    stored = StoredFile(
        name=name, place=Place.CHECKPOINT, num_bytes=size, checked_bytes=len(begin), checksum=checksum(begin)
    )
    tensors = {
        tensor: _Stored(
            file=index,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=len(begin) + entry["data_offsets"][0],
        )
        for tensor, entry in entries.items()
    }
    return stored, tensors


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
