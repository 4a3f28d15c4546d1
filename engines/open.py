"""Opens a built engine, proves it whole, and says what is in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from splash_engines.manifest import (
    TOKENIZER,
    VERSION,
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
from splash_engines.tensorrt.store import describe_plans
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.weights.source import WeightSource

Progress = Callable[[str, int, int], None]
"""Called with what has been done, bytes done and bytes in all."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    folder: Path
    model: ModelConfig
    source: WeightSource
    tokenizer_dir: Path | None
    """Holds tokenizer.json and what there was beside it; None: the checkpoint had no tokenizer."""
    manifest: Manifest
    paths: tuple[Path, ...]
    """Where manifest.files are."""


def open_engine(folder: Path) -> Engine:
    """The engine that splash-trt build wrote into `folder`. Cheap enough for every rank.

    Checks the manifest, and of each file that it is there, its size, and its header's checksum (a tokenizer's file:
    that of all of it). Numbers are held against their checksums as the source reads them; verify_engine reads all.
    Raises ValueError, naming the file and a remedy, for an engine that is unfinished, damaged or of another version,
    and for a checkpoint it refers to that is gone or has changed.
    """
    engine = _open(folder)
    for file, path in zip(engine.manifest.files, engine.paths, strict=True):
        check_file(file, path)
    config = _referred_config(engine)
    if config is not None:
        _check_config(config, engine.manifest)
    return engine


def verify_engine(folder: Path, *, progress: Progress | None = None) -> None:
    """Read all that open_engine's source could read. ValueError names the first file with a byte that differs."""
    engine = open_engine(folder)
    source = engine.source
    assert isinstance(source, EngineSource)
    total = sum(_num_bytes(tensor) for tensor in engine.manifest.tensors)
    done = 0
    for tensor in engine.manifest.tensors:
        for part in tensor.parts:
            done += source.verify(tensor, part)
            if progress is not None:
                progress(f"checking {engine.paths[part.file].name}", done, total)


def inspect_engine(folder: Path) -> dict[str, Any]:
    """What is in an engine, in plain values, whatever state its files are in: `checks` tells that of each.

    Raises ValueError for a folder without a readable manifest only.
    """
    engine = _open(folder)
    manifest, model = engine.manifest, engine.model
    kinds: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for tensor in manifest.tensors:
        kinds[_kind(tensor.name)] += _num_bytes(tensor)
        for part in tensor.parts:
            dtypes[part.dtype] += part.rows * row_bytes(tensor, part)
    return {
        "engine": str(folder),
        "format_version": VERSION,
        "built_with": manifest.built_with,
        "model_type": model.model_type,
        "sizes": _sizes(model),
        "parameters": sum(math.prod(tensor.shape) for tensor in manifest.tensors),
        "bytes_by_kind": dict(kinds),
        "bytes_by_dtype": dict(dtypes),
        "experts": _experts_stored(manifest),
        "checkpoint": manifest.origin.folder,
        "plans": describe_plans(folder),
        "tokenizer": sorted(Path(f.name).name for f in manifest.files if f.name.startswith(TOKENIZER + "/")),
        "checks": _checks(engine),
    }


def format_inspection(inspection: Mapping[str, Any]) -> str:
    """inspect_engine's values as a table to read."""
    lines: list[tuple[str, str]] = [
        ("engine", inspection["engine"]),
        ("format", f"version {inspection['format_version']}, built with Splash-TRT {inspection['built_with']}"),
        ("model", inspection["model_type"]),
        *((name.replace("_", " "), str(value)) for name, value in inspection["sizes"].items()),
        ("parameters", f"{inspection['parameters']:,}"),
        ("bytes", _bytes(sum(inspection["bytes_by_kind"].values()))),
        *((f"  {kind}", _bytes(size)) for kind, size in inspection["bytes_by_kind"].items()),
        *((f"  as {dtype}", _bytes(size)) for dtype, size in inspection["bytes_by_dtype"].items()),
        ("experts", inspection["experts"]),
        ("checkpoint", inspection["checkpoint"]),
        ("plans", inspection["plans"]),
        ("tokenizer", ", ".join(inspection["tokenizer"]) or "none"),
    ]
    checks: Mapping[str, str] = inspection["checks"]
    bad = {path: state for path, state in checks.items() if state != "ok"}
    lines.append(("checks", f"{len(checks) - len(bad)} of {len(checks)} files as they were built"))
    width = max(len(name) for name, _ in lines)
    lines += [(f"  {path}", state) for path, state in bad.items()]
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _open(folder: Path) -> Engine:
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


def _checks(engine: Engine) -> dict[str, str]:
    """For each file "ok", or what is wrong with it."""
    checks: dict[str, str] = {}

    def check(path: Path, proof: Callable[[], None]) -> None:
        try:
            proof()
            checks[str(path)] = "ok"
        except ValueError as error:
            checks[str(path)] = str(error).removeprefix(f"{path}: ")

    for file, path in zip(engine.manifest.files, engine.paths, strict=True):
        check(path, partial(check_file, file, path))
    config = _referred_config(engine)
    if config is not None:
        check(config, partial(_check_config, config, engine.manifest))
    return checks


def _referred_config(engine: Engine) -> Path | None:
    """config.json of the checkpoint that the engine refers to, if it is there."""
    for file, path in zip(engine.manifest.files, engine.paths, strict=True):
        if file.place is Place.CHECKPOINT:
            config = Path(str(path).removesuffix(file.name)) / "config.json"
            return config if config.is_file() else None
    return None


def _check_config(path: Path, manifest: Manifest) -> None:
    """ValueError if it has changed: the engine does not follow it, which nobody would notice."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if checksum(data) != manifest.origin.config_checksum:
        raise ValueError(
            f"{path}: was changed after the engine was built, and the engine does not follow it; restore it, or build "
            "the engine again (splash-trt build … --overwrite)"
        )


def _num_bytes(tensor: StoredTensor) -> int:
    return sum(part.rows * row_bytes(tensor, part) for part in tensor.parts)


def _kind(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    if ".experts." in name:
        return "routed experts"
    if ".shared." in name:
        return "shared experts"
    if last in ("gate_up", "down"):
        return "dense layers"
    if last in ("embed", "head"):
        return "embedding and head"
    if last.startswith("router"):
        return "routers"
    return "norms" if last in ("attn_norm", "mlp_norm", "final_norm") else "attention"


def _sizes(model: ModelConfig) -> dict[str, int]:
    sizes = {
        "layers": model.num_layers,
        "moe_layers": sum(kind is LayerKind.MOE for kind in model.layers),
        "hidden_size": model.hidden_size,
        "heads": model.num_heads,
        "latent_row": model.row_width,
        "vocabulary": model.vocab_size,
        "context": model.max_positions,
    }
    if model.experts is not None:
        sizes |= {"experts": model.experts.num_experts, "experts_per_token": model.experts.top_k}
    return sizes


def _experts_stored(manifest: Manifest) -> str:
    if manifest.model.experts is None:
        return "none"
    return "copied into the engine" if manifest.self_contained else "in the checkpoint, referred to with checksums"


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"
