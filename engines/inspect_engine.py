"""What `splash-trt inspect` tells about a built engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from splash_engines.manifest import TOKENIZER, VERSION, Manifest, check_file, row_bytes
from splash_engines.open import Engine, check_config, num_bytes, read_engine, referred_config
from splash_engines.tensorrt.store import describe_plans
from splash_trt.models.config import LayerKind, ModelConfig
from splash_trt.scheduler.devices import calibrated_ranks, calibration_file


def inspect_engine(folder: Path) -> dict[str, Any]:
    """What is in an engine, as plain values, even if files are missing or damaged: `checks` has the state of each.

    Raises ValueError only for a folder without a readable manifest.
    """
    engine = read_engine(folder)
    manifest, model = engine.manifest, engine.model
    kinds: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for tensor in manifest.tensors:
        kinds[_kind(tensor.name)] += num_bytes(tensor)
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
        "calibrations": [calibration_file(folder, ranks).name for ranks in calibrated_ranks(folder)],
        "tokenizer": sorted(Path(f.name).name for f in manifest.files if f.name.startswith(TOKENIZER + "/")),
        "checks": _checks(engine),
    }


def format_inspection(inspection: Mapping[str, Any]) -> str:
    """inspect_engine's values as a table of text."""
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
        ("calibrations", ", ".join(inspection["calibrations"]) or "none"),
        ("tokenizer", ", ".join(inspection["tokenizer"]) or "none"),
    ]
    checks: Mapping[str, str] = inspection["checks"]
    bad = {path: state for path, state in checks.items() if state != "ok"}
    whole = f"{len(checks) - len(bad)} of {len(checks)} files as they were built"
    lines.append(("checks", f"{whole}, by their sizes and headers"))
    width = max(len(name) for name, _ in lines)
    lines += [(f"  {path}", state) for path, state in bad.items()]
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _checks(engine: Engine) -> dict[str, str]:
    """The state of each file, by path: "ok", or what is wrong with it."""
    checks: dict[str, str] = {}

    def check(path: Path, proof: Callable[[], None]) -> None:
        try:
            proof()
            checks[str(path)] = "ok"
        except ValueError as error:
            checks[str(path)] = str(error).removeprefix(f"{path}: ")

    for file, path in zip(engine.manifest.files, engine.paths, strict=True):
        check(path, partial(check_file, file, path))
    config = referred_config(engine)
    if config is not None:
        check(config, partial(check_config, config, engine.manifest))
    return checks


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
