"""The manifest of a built engine: manifest.json, its tables, and the files that they describe.

An engine is a folder: manifest.json, weights.safetensors and tokenizer/. Tensors have the names and shapes of
weights/spec.py and are not made for a certain number of ranks: a copied tensor is stored with its cut axis first, so
that any rank's part of it is one range of bytes. Experts may stay in the checkpoint, with one part for each of the
checkpoint's tensors.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from enum import Enum
from pathlib import Path, PurePosixPath

import msgspec
import torch

from splash_trt.models.config import ModelConfig
from splash_trt.weights.spec import Cut, TensorSpec, tensor_specs

FORMAT = "splash-trt engine"
VERSION = 1
"""Counts up whenever a reader of the last version would misread what is written now."""
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer"
MAX_MANIFEST_BYTES = 500_000_000  # a model with 256 experts in each of 58 layers has 9 MB

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By their names in safetensors files."""

_REBUILD = "build the engine again (splash-trt build … --overwrite)"


class Place(str, Enum):
    ENGINE = "engine"
    CHECKPOINT = "checkpoint"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Its path inside the folder of its place."""
    place: Place
    num_bytes: int
    checked_bytes: int
    """How many of its first bytes `checksum` covers: a safetensors header, or all of a small file. They are checked
    whenever the engine is opened."""
    checksum: str


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive rows in a file, with a checksum for each chunk_rows of them (fewer at the end)."""

    file: int
    """Index into Manifest.files."""
    offset: int
    """In bytes, from the file's beginning."""
    dtype: str
    rows: int
    chunk_rows: int
    checksums: tuple[str, ...]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With one part, that is the whole tensor, with its cut axis first. Else there are k parts for each expert, which
    together are the expert's rows."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that the engine was built from."""

    folder: str
    """Its absolute path."""
    relative: str
    """Its path from the engine's folder. It is tried first, so that both can be moved together."""
    config_checksum: str
    """The checksum of its config.json."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    built_with: str
    """The version of Splash-TRT."""
    model: ModelConfig
    origin: Origin
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def self_contained(self) -> bool:
        return all(file.place is Place.ENGINE for file in self.files)


class _Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    checksum: str
    """The checksum of the bytes of `manifest` as they are in the file."""
    manifest: msgspec.Raw


def checksum(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def row_bytes(tensor: StoredTensor, part: Part) -> int:
    """Bytes of one row of the part."""
    whole = len(tensor.parts) == 1
    numbers = math.prod(tensor.shape) // part.rows if whole else math.prod(tensor.shape[2:])
    return numbers * DTYPES[part.dtype].itemsize


def encode(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(format=FORMAT, version=VERSION, checksum=checksum(body), manifest=msgspec.Raw(body))
    return msgspec.json.encode(envelope) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the engine in `folder`, checked against the model that it names.

    Raises ValueError, naming the file and a remedy, if there is none, or if it is damaged, of another version or
    inconsistent.
    """
    path = folder / MANIFEST
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}: is not a folder; give the folder that splash-trt build wrote")
    if not path.is_file():
        if (folder / "config.json").is_file():
            raise ValueError(
                f"{folder}: is a checkpoint, not an engine; build one: splash-trt build --model {folder} --out ENGINE"
            )
        raise ValueError(f"{folder}: holds no {MANIFEST}, so no finished engine; {_REBUILD}")
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"{path}: is larger than {MAX_MANIFEST_BYTES} bytes, the most that is read of a manifest")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    manifest = _decode(data, path)
    _check(manifest, path)
    return manifest


def _decode(data: bytes, path: Path) -> Manifest:
    try:
        head = msgspec.json.decode(data)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError(f"{path}: is no manifest of an engine (its format must say {FORMAT!r}); {_REBUILD}")
        if head.get("version") != VERSION:
            raise ValueError(
                f"{path}: has the version {head.get('version')!r}, and this program reads version {VERSION}; {_REBUILD}"
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        if checksum(memoryview(envelope.manifest)) != envelope.checksum:
            raise ValueError(f"{path}: was changed or damaged after it was built (its checksum differs); {_REBUILD}")
        return msgspec.json.decode(envelope.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged, cut short or no manifest: {error}; {_REBUILD}") from error


def _check(manifest: Manifest, path: Path) -> None:
    """Checks all that readers rely on: names stay inside their folders, and the tensors are the model's and lie inside
    their files. ValueError if not."""
    for file in manifest.files:
        parts = PurePosixPath(file.name)
        if not file.name or parts.is_absolute() or ".." in parts.parts or "\\" in file.name or "\0" in file.name:
            raise ValueError(f"{path}: the file {file.name!r} leads out of the {file.place.value}'s folder")
        if not 0 <= file.checked_bytes <= file.num_bytes:
            raise ValueError(f"{path}: checks {file.checked_bytes} of the {file.num_bytes} bytes of {file.name}")
    if "\0" in manifest.origin.folder + manifest.origin.relative:
        raise ValueError(f"{path}: the checkpoint's folder has a NUL character in its name")
    expected = {spec.name: spec for spec in tensor_specs(manifest.model)}
    found = [tensor.name for tensor in manifest.tensors]
    if sorted(found) != sorted(expected):
        odd = sorted(set(found) ^ set(expected)) or ["a tensor twice"]
        raise ValueError(f"{path}: its tensors are not the model's: {', '.join(odd[:3])}; {_REBUILD}")
    for tensor in manifest.tensors:
        if not _fits(tensor, expected[tensor.name], manifest.files):
            raise ValueError(f"{path}: the entry of {tensor.name} does not fit the model or its file; {_REBUILD}")


def _fits(tensor: StoredTensor, spec: TensorSpec, files: tuple[StoredFile, ...]) -> bool:
    if tensor.shape != spec.shape or not tensor.parts:
        return False
    rows = spec.shape[spec.axis]
    if len(tensor.parts) > 1:
        if spec.cut is not Cut.EXPERTS or len(tensor.parts) % spec.shape[0]:
            return False
        each = len(tensor.parts) // spec.shape[0]
        rows = spec.shape[1] // each
        if rows * each != spec.shape[1]:
            return False
    for part in tensor.parts:
        if part.dtype not in DTYPES or part.rows != rows or part.chunk_rows < 1 or not 0 <= part.file < len(files):
            return False
        if len(part.checksums) != -(-rows // part.chunk_rows) or part.offset < 0:
            return False
        if part.offset + rows * row_bytes(tensor, part) > files[part.file].num_bytes:
            return False
    return True


def file_paths(folder: Path, manifest: Manifest) -> tuple[Path, ...]:
    """The path of each of manifest.files, for the engine in `folder`; the files may be missing.

    The checkpoint is looked for at its relative path from the engine, then where it was when the engine was built.
    """
    files = [file for file in manifest.files if file.place is Place.CHECKPOINT]
    beside = Path(os.path.normpath(folder.resolve() / manifest.origin.relative))
    built = Path(manifest.origin.folder)
    fitting = (place for place in (beside, built) if all(_size(place / f.name) == f.num_bytes for f in files))
    # If neither fits, errors should name a folder that exists.
    checkpoint = next(fitting, beside if beside.is_dir() else built)
    return tuple((folder if file.place is Place.ENGINE else checkpoint) / file.name for file in manifest.files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def check_file(file: StoredFile, path: Path) -> None:
    """ValueError, which names the file, if it is missing, has another size, or its checked bytes have changed."""
    remedy = _REBUILD
    if file.place is Place.CHECKPOINT:
        remedy = (
            f"the engine refers to the experts in the checkpoint {path.parent}: restore it, or {_REBUILD[:-1]}), with "
            "--self-contained if the checkpoint is to go away"
        )
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a named pipe would wait for a writer
            raise ValueError(f"{path}: is not a file; {remedy}")
        size = found.st_size
        with path.open("rb") as opened:
            begin = opened.read(file.checked_bytes) if size == file.num_bytes else b""
    except FileNotFoundError as error:
        raise ValueError(f"{path}: is missing; {remedy}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if size != file.num_bytes:
        raise ValueError(
            f"{path}: has {size} bytes and had {file.num_bytes} when the engine was built: it was changed or cut "
            f"short; {remedy}"
        )
    if checksum(begin) != file.checksum:
        raise ValueError(f"{path}: was changed or damaged after the engine was built; {remedy}")
