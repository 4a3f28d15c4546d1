"""Plans in an engine's folder: plans/ has a file for each, and plans.json describes them and who uses which."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from splash_engines.manifest import Place, StoredFile, checksum
from splash_engines.tensorrt.cache import PlanCache
from splash_engines.tensorrt.plans import Plan, PlanSet, Use
from splash_engines.whole_folder import writing
from splash_trt.config import Layout

FORMAT = "splash-trt plans"
VERSION = 1
FOLDER = "plans"
INDEX = "plans.json"
MARKERS = (f"{FOLDER}/{INDEX}",)
"""A folder with these files, and no weights, has plans alone."""
MAX_INDEX_BYTES = 50_000_000
CHECKED_BYTES = 4096  # first bytes of a plan that are checked when the engine is opened; all are when it is loaded

_REBUILD = "build the engine again (splash-trt build --engine tensorrt … --overwrite)"


class _Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    checksum: str
    """The checksum of the bytes of `plans` as they are in the file."""
    plans: msgspec.Raw


def write_plans(plans: PlanSet, cache: PlanCache, folder: Path) -> list[StoredFile]:
    """Puts plans into `folder`, an engine that is being built. Returns the files' entries for its manifest.

    Raises ValueError, naming the path and a remedy, if it cannot be written, or if the cache has other plans by now.
    """
    target = folder / FOLDER
    body = msgspec.json.encode(plans, order="deterministic")
    envelope = _Envelope(format=FORMAT, version=VERSION, checksum=checksum(body), plans=msgspec.Raw(body))
    index = msgspec.json.encode(envelope) + b"\n"
    stored = []
    with writing(target):
        target.mkdir()
        (target / INDEX).write_bytes(index)
        stored.append(_stored(INDEX, index, len(index)))
        for key, plan in sorted(plans.plans.items()):
            data = cache.read(key, plan.checksum)
            (target / f"{key}.plan").write_bytes(data)
            stored.append(_stored(f"{key}.plan", data[:CHECKED_BYTES], len(data)))
    return stored


def _stored(name: str, checked: bytes, num_bytes: int) -> StoredFile:
    return StoredFile(
        name=f"{FOLDER}/{name}",
        place=Place.ENGINE,
        num_bytes=num_bytes,
        checked_bytes=len(checked),
        checksum=checksum(checked),
    )


def has_plans(folder: Path) -> bool:
    return os.path.isfile(folder / FOLDER / INDEX)


def read_plans(folder: Path) -> PlanSet:
    """The plans of the engine in `folder`.

    Raises ValueError, naming the file and a remedy, if there are none, or if they are damaged or of another version.
    """
    path = folder / FOLDER / INDEX
    if not has_plans(folder):
        raise ValueError(f"{folder}: has no plans for TensorRT; {_REBUILD}")
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"{path}: is larger than {MAX_INDEX_BYTES} bytes, the most that is read of an index")
        envelope = msgspec.json.decode(path.read_bytes(), type=_Envelope)
        if (envelope.format, envelope.version) != (FORMAT, VERSION):
            raise ValueError(
                f"{path}: is {envelope.format!r} of version {envelope.version}, and this program reads {FORMAT!r} of "
                f"version {VERSION}; {_REBUILD}"
            )
        if checksum(memoryview(envelope.plans)) != envelope.checksum:
            raise ValueError(f"{path}: was changed or damaged after it was built (its checksum differs); {_REBUILD}")
        return msgspec.json.decode(envelope.plans, type=PlanSet)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged, cut short or no index of plans: {error}; {_REBUILD}") from error


def describe_plans(folder: Path) -> str:
    """One line on the plans of the engine in `folder`, or on what is wrong with them."""
    if not has_plans(folder):
        return "none"
    try:
        plans = read_plans(folder)
    except ValueError as error:
        return str(error)
    settings = plans.settings
    return (
        f"{len(plans.plans)} by {plans.builder} for {', '.join(settings.targets)}: {settings.dtype}, "
        f"{', '.join(layout.name.lower() for layout in settings.layouts)} on "
        f"{', '.join(str(n) for n in settings.ranks)} ranks"
    )


def use_of(plans: PlanSet, *, num_ranks: int, layout: Layout, rank: int) -> Use:
    """The plans of one rank under one layout. ValueError if the engine was built without them."""
    for use in plans.uses:
        if (use.num_ranks, use.layout, use.rank) == (num_ranks, layout, rank):
            return use
    ranks = ", ".join(str(n) for n in plans.settings.ranks)
    layouts = ", ".join(each.name.lower() for each in plans.settings.layouts)
    raise ValueError(
        f"layout: the engine's plans are for {ranks} ranks and the layouts {layouts}, not for {layout.name.lower()} on "
        f"{num_ranks}; build it with --ranks and --layouts that name them"
    )


def plan_bytes(folder: Path, plan: Plan) -> bytes:
    """A plan's bytes, to be deserialised. ValueError, which names the file, if it is missing or has changed."""
    path = folder / FOLDER / f"{plan.key}.plan"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}; {_REBUILD}") from error
    if checksum(data) != plan.checksum:
        raise ValueError(f"{path}: was changed or damaged after it was built; {_REBUILD}")
    return data


def verify_plans(folder: Path) -> int:
    """Reads and checks all plans; returns their number. ValueError names the first file that is missing or changed."""
    plans = read_plans(folder).plans.values()
    for plan in plans:
        plan_bytes(folder, plan)
    return len(plans)
