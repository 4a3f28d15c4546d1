"""Built engines notice every change: a flipped byte, a file cut short or gone, another version, a bad manifest."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from splash_engines.build import build_engine
from splash_engines.inspect_engine import format_inspection, inspect_engine
from splash_engines.manifest import MANIFEST, WEIGHTS, Part, Place, checksum
from splash_engines.open import Engine, open_engine, verify_engine
from splash_trt.commands.engines import inspect_command
from splash_trt.weights.spec import tensor_specs
from tests.oracles.tiny_models import make_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of three shards and two engines of it, moved since; not to be changed."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("made") / "first"
    make_model("v3_base", root / "model", shards=3)
    (root / "model" / "tokenizer.json").write_text('{"version": "1.0"}')
    build_engine(root / "model", root / "engine")
    build_engine(root / "model", root / "whole", self_contained=True)
    return root.rename(root.parent / "then")


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """The same, to change at will."""
    return Path(shutil.copytree(made, tmp_path / "place"))


def load(engine: Engine) -> None:
    """What all ranks together do at their start."""
    for spec in tensor_specs(engine.model):
        engine.source.read(spec, 0, spec.shape[spec.axis], torch.empty(spec.shape))


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def rewrite_manifest(engine: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest and make its checksum right again."""
    envelope = json.loads((engine / MANIFEST).read_text())
    change(envelope["manifest"])
    body = msgspec.json.encode(envelope["manifest"])
    envelope |= {"checksum": checksum(body), "manifest": msgspec.Raw(body)}
    (engine / MANIFEST).write_bytes(msgspec.json.encode(envelope))


def parts_in(engine: Engine, where: Place) -> list[tuple[Path, Part]]:
    files = engine.manifest.files
    parts = [part for tensor in engine.manifest.tensors for part in tensor.parts]
    return [(engine.paths[part.file], part) for part in parts if files[part.file].place is where]


@contextmanager
def refused(path: Path, word: str = "") -> Iterator[None]:
    """A ValueError that begins with the path, and says `word`."""
    with pytest.raises(ValueError) as caught:
        yield
    assert str(caught.value).startswith(f"{path}: ") and word in str(caught.value), caught.value


@pytest.mark.parametrize("where", list(Place))
def test_flipped_byte_in_a_tensor(where: Place, place: Path) -> None:
    """Seen when it is loaded, in the first, the last and any other tensor; and by verify_engine."""
    engine = open_engine(place / "engine")
    load(engine)
    parts = parts_in(engine, where)
    assert len(parts) > 20 and all(path.is_relative_to(place) for path, _ in parts)
    for path, part in (parts[0], parts[9], parts[-1]):
        size = (part.rows if where is Place.CHECKPOINT else 1) * 4
        for position in (part.offset, part.offset + size - 1):
            flip(path, position)
            engine = open_engine(place / "engine")  # headers and sizes are as they were
            with refused(path, "was changed, damaged or cut short after the engine was built"):
                load(engine)
            with refused(path, f"in bytes {part.offset} to "):
                verify_engine(place / "engine")
            flip(path, position)
    verify_engine(place / "engine")


def test_flipped_byte_that_a_rank_does_not_read(place: Path) -> None:
    engine = open_engine(place / "engine")
    spec = next(spec for spec in tensor_specs(engine.model) if spec.name == "layers.1.experts.gate_up")
    tensor = next(tensor for tensor in engine.manifest.tensors if tensor.name == spec.name)
    part = tensor.parts[5]  # up of expert 2
    flip(engine.paths[part.file], part.offset)
    out = torch.empty(2, *spec.shape[1:])
    engine.source.read(spec, 0, 2, out)
    engine.source.read(spec, 3, 5, out)
    with refused(engine.paths[part.file], spec.name):
        engine.source.read(spec, 2, 4, out)


@pytest.mark.parametrize("position", [0, 20, -2])
def test_flipped_byte_elsewhere(position: int, place: Path) -> None:
    """In headers, the tokenizer and the manifest: seen when the engine is opened."""
    engine, model = place / "engine", place / "model"
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) == 3
    for path in (engine / WEIGHTS, *shards, engine / "tokenizer" / "tokenizer.json", engine / MANIFEST):
        length = path.stat().st_size
        if path.suffix == ".safetensors":
            length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        flip(path, position % length)
        with refused(path, "build the engine again"):
            open_engine(engine)
        flip(path, position % length)
    open_engine(engine)


def test_every_bit_of_the_manifest_counts(place: Path) -> None:
    path = place / "engine" / MANIFEST
    size = path.stat().st_size
    for position in range(0, size - 1, size // 150):  # the last byte is the end of the line
        flip(path, position)
        with refused(path):
            open_engine(place / "engine")
        flip(path, position)


@pytest.mark.parametrize("keep", [0, 5, 3000, -1])
def test_file_cut_short(keep: int, place: Path) -> None:
    engine = place / "engine"
    paths = [path for path in (*engine.rglob("*"), *(place / "model").glob("*.safetensors")) if path.is_file()]
    assert len(paths) == 7
    for path in paths:
        data = path.read_bytes()
        path.write_bytes(data[: keep - 1 if path.name == MANIFEST and keep < 0 else keep][: len(data) - 1])
        with refused(path):
            open_engine(engine)
        path.unlink()
        with refused(engine if path.name == MANIFEST else path):
            open_engine(engine)
        path.write_bytes(data)
    open_engine(engine)


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file(put: Callable[[Path], object], name: str, place: Path) -> None:
    """A pipe was waited at for ever."""
    path = place / "engine" / name
    path.unlink()
    put(path)
    with refused(path, "is not a file; build the engine again"):
        open_engine(place / "engine")


def test_change_while_it_is_open(place: Path) -> None:
    engine = open_engine(place / "engine")
    for path in (place / "engine" / WEIGHTS, sorted((place / "model").glob("*.safetensors"))[0]):
        data = path.read_bytes()
        os.truncate(path, len(data) // 3)
        with refused(path, "cut short"):
            load(engine)
        path.unlink()
        with refused(path, "cannot be read"):
            load(engine)
        path.write_bytes(data)
    load(engine)


def test_moved(place: Path, tmp_path: Path) -> None:
    """Together with its checkpoint an engine works anywhere; alone it finds the checkpoint where it was, if there."""
    shutil.move(place, tmp_path / "elsewhere")
    load(open_engine(tmp_path / "elsewhere" / "engine"))
    build_engine(tmp_path / "elsewhere" / "model", tmp_path / "elsewhere" / "engine", overwrite=True)
    (tmp_path / "far" / "away").mkdir(parents=True)
    alone = Path(shutil.move(tmp_path / "elsewhere" / "engine", tmp_path / "far" / "away" / "engine"))
    (tmp_path / "far" / "away" / "model").mkdir()  # nothing to do with it
    load(open_engine(alone))
    (tmp_path / "far" / "away" / "model").rmdir()
    shutil.rmtree(tmp_path / "elsewhere" / "model")
    shard = tmp_path / "elsewhere" / "model" / "model-00001-of-00003.safetensors"
    with refused(shard, "is missing; the engine refers to the experts in the checkpoint"):
        open_engine(alone)
    with refused(shard, "--self-contained"):
        open_engine(alone)


def test_self_contained_needs_no_checkpoint(place: Path, tmp_path: Path) -> None:
    whole = Path(shutil.move(place / "whole", tmp_path / "whole"))
    shutil.rmtree(place)
    names = [file.name for file in open_engine(whole).manifest.files]
    assert sorted(names) == ["tokenizer/generation_config.json", "tokenizer/tokenizer.json", WEIGHTS]
    load(open_engine(whole))
    verify_engine(whole)
    assert open_engine(whole).tokenizer_dir == whole / "tokenizer"


def test_checkpoint_with_another_config(place: Path) -> None:
    path = place / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_interleave": False}))
    with refused(path, "was changed after the engine was built"):
        open_engine(place / "engine")
    load(open_engine(place / "whole"))  # refers to nothing
    path.unlink()
    load(open_engine(place / "engine"))  # its own is enough


def test_checkpoint_written_anew(place: Path) -> None:
    """Other numbers in files of the same names, sizes and headers."""
    make_model("v3_base", place / "model", seed=1, shards=3)
    engine = open_engine(place / "engine")
    with pytest.raises(ValueError, match=r"model-0000\d-of-00003.safetensors: was changed, damaged or cut short"):
        load(engine)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version(version: object, place: Path) -> None:
    path = place / "engine" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with refused(path, f"has the version {version!r}, and this program reads version 1; build the engine again"):
        open_engine(place / "engine")


@pytest.mark.parametrize("name", ["../model/a", "/etc/passwd", "a/../../b", "..\\b", "", "a\0b"])
@pytest.mark.parametrize("index", [0, 1])
def test_name_that_leads_out_of_its_folder(index: int, name: str, place: Path) -> None:
    rewrite_manifest(place / "engine", lambda m: m["files"][index].update(name=name))
    with refused(place / "engine" / MANIFEST, "leads out of the"):
        open_engine(place / "engine")


CHANGES: dict[str, Callable[[Any], object]] = {
    "tensor missing": lambda m: m["tensors"].pop(3),
    "tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
    "tensor unknown": lambda m: m["tensors"][0].update(name="extra"),
    "shape": lambda m: m["tensors"][0].update(shape=[64, 256]),
    "no part": lambda m: m["tensors"][0].update(parts=[]),
    "part missing": lambda m: [tensor["parts"].pop() for tensor in m["tensors"] if "experts" in tensor["name"]],
    "offset below": lambda m: m["tensors"][0]["parts"][0].update(offset=-4),
    "offset beyond": lambda m: m["tensors"][0]["parts"][0].update(offset=m["files"][0]["num_bytes"] - 8),
    "rows": lambda m: m["tensors"][0]["parts"][0].update(rows=7),
    "no rows": lambda m: m["tensors"][0]["parts"][0].update(rows=0),
    "chunk": lambda m: m["tensors"][0]["parts"][0].update(chunk_rows=0),
    "checksum missing": lambda m: m["tensors"][0]["parts"][0].update(checksums=[]),
    "dtype": lambda m: m["tensors"][0]["parts"][0].update(dtype="I64"),
    "file": lambda m: m["tensors"][0]["parts"][0].update(file=99),
    "file below": lambda m: m["tensors"][0]["parts"][0].update(file=-1),
    "header": lambda m: m["files"][0].update(checked_bytes=1 << 40),
    "model": lambda m: m["model"].pop("hidden_size"),
    "another model": lambda m: m["model"].update(hidden_size=65),
    "place": lambda m: m["files"][0].update(place="anywhere"),
    "field": lambda m: m.update(extra=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_manifest_at_odds_with_itself(change: str, place: Path) -> None:
    rewrite_manifest(place / "engine", CHANGES[change])
    with refused(place / "engine" / MANIFEST):
        open_engine(place / "engine")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": "splash-trt engine"}'])
def test_no_manifest(data: bytes, place: Path) -> None:
    path = place / "engine" / MANIFEST
    for content in (data, pickle.dumps(Trap(place / "sprung"))):
        path.write_bytes(content)
        with refused(path):
            open_engine(place / "engine")
    assert not (place / "sprung").exists()
    path.unlink()
    with refused(place / "engine", "holds no manifest.json, so no finished engine; build the engine again"):
        open_engine(place / "engine")
    with refused(place / "model", f"splash-trt build --model {place / 'model'}"):
        open_engine(place / "model")


def test_inspection(place: Path) -> None:
    found = inspect_engine(place / "engine")
    engine = open_engine(place / "engine")
    sizes = [torch.Size(spec.shape).numel() for spec in tensor_specs(engine.model)]
    assert found["parameters"] == sum(sizes) and found["bytes_by_dtype"] == {"F32": 4 * sum(sizes)}
    assert sum(found["bytes_by_kind"].values()) == 4 * sum(sizes)
    assert found["bytes_by_kind"]["routed experts"] == 4 * 2 * 8 * 3 * 40 * 64
    assert found["model_type"] == "deepseek_v3" and found["format_version"] == 1
    assert found["sizes"]["experts"] == 8 and found["sizes"]["heads"] == 4
    assert "referred to" in found["experts"] and "copied" in inspect_engine(place / "whole")["experts"]
    # Three shards and their config.json, the engine's own weights and two files of a tokenizer.
    assert len(found["checks"]) == 7 and set(found["checks"].values()) == {"ok"}
    assert json.loads(json.dumps(found)) == found
    assert "7 of 7 files as they were built" in format_inspection(found)
    assert "calibrations          none" in format_inspection(found)
    for name in ("device-10.json", "device-2.json", "device-old.json"):
        (place / "engine" / name).write_text("{}")
    table = format_inspection(inspect_engine(place / "engine"))
    assert "calibrations          device-2.json, device-10.json\n" in table

    path = place / "model" / "model-00002-of-00003.safetensors"
    flip(path, 20)
    found = inspect_engine(place / "engine")
    assert [name for name, state in found["checks"].items() if state != "ok"] == [str(path)]
    assert "was changed" in found["checks"][str(path)]
    table = format_inspection(found)
    assert "6 of 7 files" in table and f"  {path}  was changed or damaged" in table


def test_inspection_of_every_number(place: Path) -> None:
    def inspect(*more: str) -> Any:
        return CliRunner().invoke(inspect_command, [str(place / "engine"), *more])

    assert "verified" not in inspect().output
    whole = inspect("--verify")
    assert whole.exit_code == 0 and "verified              as built: every number" in whole.stdout
    path, part = parts_in(open_engine(place / "engine"), Place.CHECKPOINT)[3]
    flip(path, part.offset)
    assert inspect().exit_code == 0, "sizes and headers are as they were"
    refusal = inspect("--verify")
    assert refusal.exit_code != 0 and f"{path}: was changed, damaged or cut short" in refusal.output
    assert "--ops" in inspect("--verify", "--ops").output
