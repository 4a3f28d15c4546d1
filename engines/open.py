"""Opens a built engine, after checking that it is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splash_engines.manifest import (
    TOKENIZER,
    Manifest,
    Place,
    StoredTensor,
    check_file,
    checksum,
    file_paths,
    read_manifest,
    row_bytes,
)
from splash_engines.source import EngineSource
from splash_trt.models.config import ModelConfig
from splash_trt.weights.source import WeightSource

Progress = Callable[[str, int, int], None]
"""Called with what has just been done, the bytes done so far, and the bytes in all."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    folder: Path
    model: ModelConfig
    source: WeightSource
    tokenizer_dir: Path | None
    """The folder with tokenizer.json and its other files; None: the checkpoint had no tokenizer."""
    manifest: Manifest
    paths: tuple[Path, ...]
    """The paths of manifest.files, in their order."""


def open_engine(folder: Path) -> Engine:
    """The engine that splash-trt build wrote into `folder`. Cheap enough for every rank.

    Checks the manifest and, for each file, that it exists, its size, and its header's checksum (of a tokenizer's file,
    the checksum of all of it). Weights are checked when the source reads them; verify_engine reads all of them.
    Raises ValueError, naming the file and a remedy, for an engine that is unfinished, damaged or of another version,
    and if the checkpoint that it refers to is missing or has changed.
    """
    engine = read_engine(folder)
    for file, path in zip(engine.manifest.files, engine.paths, strict=True):
        check_file(file, path)
    config = referred_config(engine)
    if config is not None:
        check_config(config, engine.manifest)
    return engine


def verify_engine(folder: Path, *, progress: Progress | None = None) -> None:
    """Reads and checks all weights of an engine. ValueError names the first file that has a byte changed."""
    engine = open_engine(folder)
    source = engine.source
    assert isinstance(source, EngineSource)
    total = sum(num_bytes(tensor) for tensor in engine.manifest.tensors)
    done = 0
    for tensor in engine.manifest.tensors:
        for part in tensor.parts:
            done += source.verify(tensor, part)
            if progress is not None:
                progress(f"checking {engine.paths[part.file].name}", done, total)


def read_engine(folder: Path) -> Engine:
    """The engine, from its manifest alone; no other file is looked at. ValueError if the manifest cannot be read."""
    manifest = read_manifest(folder)
    paths = file_paths(folder, manifest)
    has_tokenizer = any(file.name == f"{TOKENIZER}/tokenizer.json" for file in manifest.files)
    return Engine(
        folder=folder,
        model=manifest.model,
        source=EngineSource(manifest, paths),
        tokenizer_dir=folder / TOKENIZER if has_tokenizer else None,
        manifest=manifest,
        paths=paths,
    )


def referred_config(engine: Engine) -> Path | None:
    """The path of config.json in the checkpoint that the engine refers to; None if there is none."""
    for file, path in zip(engine.manifest.files, engine.paths, strict=True):
        if file.place is Place.CHECKPOINT:
            config = Path(str(path).removesuffix(file.name)) / "config.json"
            return config if config.is_file() else None
    return None


def check_config(path: Path, manifest: Manifest) -> None:
    """ValueError if config.json was changed after the build: the engine would silently go on with the old one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if checksum(data) != manifest.origin.config_checksum:
        raise ValueError(
            f"{path}: was changed after the engine was built, and the engine does not follow it; restore it, or build "
            "the engine again (splash-trt build … --overwrite)"
        )


def num_bytes(tensor: StoredTensor) -> int:
    """The bytes of all parts of a tensor, as they are stored."""
    return sum(part.rows * row_bytes(tensor, part) for part in tensor.parts)
