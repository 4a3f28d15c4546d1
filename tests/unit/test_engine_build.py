"""Built engines: they give every rank the checkpoint's numbers, and appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import splash_engines.build
import splash_engines.source
import splash_engines.whole_folder
from splash_engines.build import build_engine
from splash_engines.inspect_engine import inspect_engine
from splash_engines.manifest import MANIFEST, WEIGHTS, checksum
from splash_engines.open import open_engine, verify_engine
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.control import Kind
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Request, SamplingParams
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.weights.shards import others_block, own_block
from splash_trt.weights.source import WeightSource
from splash_trt.weights.spec import TensorSpec, tensor_specs
from splash_trt.worker import start_worker
from tests.oracles.tiny_models import make_model

VARIANTS = ("v3_base", "v3_flat_yarn", "v3_half_rope", "v2_five_heads", "glm_mixed")
TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ x }}"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tiny models have several chunks and blocks."""
    torch.set_num_threads(1)
    monkeypatch.setattr(splash_engines.build, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(splash_engines.build, "BLOCK_BYTES", 6000)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by the variant's name; not to be changed."""
    root = tmp_path_factory.mktemp("made")

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            make_model(name, path, shards=3 if name == "v3_base" else 1)
            for file, text in TOKENIZER.items():
                (path / file).write_text(text)
        return path

    return folder


@pytest.fixture
def checkpoint(made: Callable[[str], Path], tmp_path: Path) -> Path:
    """One of three shards, to change at will."""
    return Path(shutil.copytree(made("v3_base"), tmp_path / "place" / "model"))


def read(source: WeightSource, spec: TensorSpec, begin: int, end: int) -> torch.Tensor:
    out = torch.full((*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :]), torch.nan)
    source.read(spec, begin, end, out)
    return out


def assert_same(found: WeightSource, expected: WeightSource) -> None:
    assert found.model == expected.model
    for num_ranks in (1, 2, 3, 4):
        for rank in range(num_ranks):
            for block in (own_block, others_block, partial(own_block, experts_cut="inside")):
                for shard in block(found.model, rank, num_ranks, "float32").shards:
                    for begin, end in shard.parts:
                        parts = [read(source, shard.spec, begin, end) for source in (found, expected)]
                        assert torch.equal(*parts), (shard.spec.name, num_ranks, rank)


@contextmanager
def refused(path: Path | str, word: str = "") -> Iterator[None]:
    """A ValueError that begins with the path, and says `word`."""
    with pytest.raises(ValueError) as caught:
        yield
    assert str(caught.value).startswith(f"{path}: ") and word in str(caught.value), caught.value


@pytest.mark.parametrize("self_contained", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_ranks_parts(name: str, self_contained: bool, made: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "engine"
    build_engine(made(name), out, self_contained=self_contained)
    assert_same(open_engine(out).source, Checkpoint(made(name), load_config(made(name))))
    verify_engine(out)
    assert not [path.name for path in tmp_path.iterdir() if path != out]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("self_contained", [False, True])
def test_mixed_dtypes(self_contained: bool, fused: bool, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Each number keeps its value, and each tensor its dtype or one that holds those of all it was made of."""
    folder = Path(shutil.copytree(made("glm_mixed"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if not name.endswith(("e_score_correction_bias", "up_proj.weight")):
            tensors[name] = tensors[name].to(torch.float16 if "down" in name else torch.bfloat16)
    if fused:
        for layer in (0, 2):
            prefix = f"model.layers.{layer}.mlp.experts."
            each = [[tensors.pop(f"{prefix}{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(8)]
            tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat([g.float(), u]) for g, u, _ in each])
            tensors[prefix + "down_proj"] = torch.stack([down for _, _, down in each])
    save_file(tensors, folder / "model.safetensors")
    build_engine(folder, tmp_path / "engine", self_contained=self_contained)
    engine = open_engine(tmp_path / "engine")
    assert_same(engine.source, Checkpoint(folder, load_config(folder)))
    stored = {tensor.name: {part.dtype for part in tensor.parts} for tensor in engine.manifest.tensors}
    assert stored["embed"] == {"BF16"} and stored["layers.0.router_bias"] == {"F32"}
    assert stored["layers.1.gate_up"] == {"F32"} and stored["layers.1.down"] == {"F16"}
    separate = {"BF16", "F32"} if not fused and not self_contained else {"F32"}
    assert stored["layers.0.experts.gate_up"] == separate and stored["layers.0.experts.down"] == {"F16"}
    for spec in tensor_specs(engine.model):
        out = torch.empty(spec.shape, dtype=torch.float64)
        engine.source.read(spec, 0, spec.shape[spec.axis], out)
        assert torch.equal(out.float(), read(engine.source, spec, 0, spec.shape[spec.axis])), spec.name


@pytest.mark.parametrize("self_contained", [False, True])
def test_one_expert(self_contained: bool, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Its matrix is then all of the engine's tensor."""
    folder = Path(shutil.copytree(made("glm_mixed"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if ".experts." not in name or ".experts.0." in name}
    cut = {name: t[:1].clone() if ".mlp.gate." in name else t for name, t in kept.items()}
    save_file(cut, folder / "model.safetensors")
    build_engine(folder, tmp_path / "engine", self_contained=self_contained)
    assert_same(open_engine(tmp_path / "engine").source, Checkpoint(folder, load_config(folder)))


def test_weights_are_a_safetensors_file(checkpoint: Path, tmp_path: Path) -> None:
    """Each tensor with its cut axis first, at a multiple of its item's size; and two builds are the same bytes."""
    for out in (tmp_path / "a", tmp_path / "b"):
        build_engine(checkpoint, out, self_contained=True)
    source = Checkpoint(checkpoint, load_config(checkpoint))
    with safe_open(tmp_path / "a" / WEIGHTS, framework="pt") as file:
        for spec in tensor_specs(source.model):
            whole = read(source, spec, 0, spec.shape[spec.axis])
            assert torch.equal(file.get_tensor(spec.name), whole.movedim(spec.axis, 0))
    for tensor in open_engine(tmp_path / "a").manifest.tensors:
        assert tensor.parts[0].offset % 4 == 0 and tensor.parts[0].dtype == "F32"
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert (tmp_path / "a" / MANIFEST).read_bytes() == (tmp_path / "b" / MANIFEST).read_bytes()


def test_a_rank_reads_its_part_only(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one chunk more at each end, whatever the axis of the cut."""
    build_engine(checkpoint, tmp_path / "engine")
    source = open_engine(tmp_path / "engine").source
    sizes: list[int] = []

    def counting(data: bytearray) -> str:
        sizes.append(len(data))
        return checksum(data)

    monkeypatch.setattr(splash_engines.source, "checksum", counting)
    for spec in tensor_specs(source.model):
        length = spec.shape[spec.axis]
        sizes.clear()
        part = read(source, spec, length // 4, length // 2)
        row = part.numel() * 4 // part.shape[spec.axis]
        chunk = min(length * row, 1000 + row)
        assert part.numel() * 4 <= sum(sizes) <= part.numel() * 4 + 2 * chunk, spec.name
        assert max(sizes) <= max(chunk, 40 * 64 * 4)  # one expert's matrix is one chunk


def generate(folder: Path, source: WeightSource, layout: Layout) -> list[tuple[int, ...]]:
    model = load_config(folder)
    config = EngineConfig(num_ranks=2, layout=layout, dtype="float64", memory_bytes=8 << 20)
    world = ThreadWorld(2)

    def follow(rank: World) -> None:
        start_worker(rank, model, config, source).follow()

    worker = start_worker(world.start(follow), model, config, source)
    orchestrator = Orchestrator.of(model, config, worker)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        orchestrator.add(Request(id=str(i), prompt=tuple(range(5 + i, 30 + 9 * i)), sampling=sampling))
    while not orchestrator.idle:
        for delta in orchestrator.step():
            found[delta.request_id] = found.get(delta.request_id, ()) + tuple(delta.tokens)
    worker.world.control.send(Kind.STOP)
    world.join()
    return [found[str(i)] for i in range(3)]


def test_same_tokens_as_from_the_checkpoint(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = made("v3_half_rope")
    build_engine(folder, tmp_path / "engine")
    found = generate(folder, open_engine(tmp_path / "engine").source, Layout.DP)
    assert found == generate(folder, Checkpoint(folder, load_config(folder)), Layout.DP)
    assert all(len(tokens) == 6 for tokens in found)


def test_progress(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build_engine(checkpoint, tmp_path / "engine", progress=lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    kinds = inspect_engine(tmp_path / "engine")["bytes_by_kind"]
    assert done == sorted(done) and seen[-1][1] == seen[-1][2] == sum(kinds.values())
    assert {what.split()[0] for what, _, _ in seen} == {"copying", "checking"}
    seen.clear()
    verify_engine(tmp_path / "engine", progress=lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2] == done[-1]


class Stop(BaseException):
    """As KeyboardInterrupt, which ends no test run."""


def stopping(at: int, stop: Callable[[], object]) -> Callable[[str, int, int], None]:
    calls = iter(range(1_000_000))

    def progress(what: str, done: int, total: int) -> None:
        if next(calls) == at or (at < 0 and done == total):
            stop()

    return progress


def raise_stop() -> None:
    raise Stop


@pytest.mark.parametrize("at", [0, 7, 60, 120, -1])
def test_stopped_build_leaves_nothing(at: int, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        build_engine(checkpoint, tmp_path / "new" / "engine", progress=stopping(at, raise_stop))
    assert list((tmp_path / "new").iterdir()) == []
    with refused(tmp_path / "new" / "engine", "is not a folder"):
        open_engine(tmp_path / "new" / "engine")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("at", [0, 60, -1])
@pytest.mark.parametrize("over", [False, True])
def test_killed_build_leaves_nothing_that_opens(over: bool, at: int, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines" / "one"
    if over:
        build_engine(checkpoint, out, self_contained=True)
    child = os.fork()
    if child == 0:
        try:
            kill = stopping(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            build_engine(checkpoint, out, overwrite=over, progress=kill)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    left = [path for path in out.parent.iterdir() if path != out]
    assert len(left) == 1
    with refused(left[0], f"holds no {MANIFEST}"):
        open_engine(left[0])
    assert out.exists() == over
    if over:
        assert open_engine(out).manifest.self_contained  # the old one
    build_engine(checkpoint, out, overwrite=over)
    assert list(out.parent.iterdir()) == [out]
    assert not open_engine(out).manifest.self_contained


def test_two_builds_at_once(checkpoint: Path, tmp_path: Path) -> None:
    """The one that ends first stands; it does not remove what the other has so far."""
    out = tmp_path / "engine"
    with refused(out, "is an engine already"):
        build_engine(checkpoint, out, progress=stopping(60, lambda: build_engine(checkpoint, out)))
    verify_engine(out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_at_the_target(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    out.mkdir()
    build_engine(checkpoint, out, self_contained=True)  # an empty folder is as good as none
    with refused(out, "--overwrite"):
        build_engine(checkpoint, out)
    assert open_engine(out).manifest.self_contained
    build_engine(checkpoint, out, overwrite=True)
    assert not open_engine(out).manifest.self_contained
    for path in (tmp_path / "file", tmp_path / "other" / "file"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with refused(tmp_path / "file", "is a file"):
        build_engine(checkpoint, tmp_path / "file", overwrite=True)
    with refused(tmp_path / "file" / "engine", "--out"):
        build_engine(checkpoint, tmp_path / "file" / "engine")
    for folder in (tmp_path / "other", checkpoint):
        with refused(folder, "other things than an engine"):
            build_engine(checkpoint, folder, overwrite=True)
    with refused(tmp_path / "absent", "is not a folder"):
        build_engine(tmp_path / "absent", out)
    assert (tmp_path / "other" / "file").read_text() == "mine" and (checkpoint / "config.json").exists()


@pytest.mark.parametrize(("number", "word"), [(errno.ENOSPC, "free some space"), (errno.EACCES, "you may write to")])
def test_disk_that_refuses(
    number: int, word: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    out = tmp_path / "new" / "engine"
    for module, name in ((splash_engines.build, "_write"), (splash_engines.whole_folder.tempfile, "mkdtemp")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(ValueError, match=f"new/.*cannot be written: {os.strerror(number)}; .*{word}"):
                build_engine(checkpoint, out)
        assert list((tmp_path / "new").iterdir()) == []


def test_disk_that_is_too_small(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with refused(tmp_path / "engine", "0.0 GB are free"):
        build_engine(checkpoint, tmp_path / "engine", progress=stopping(0, raise_stop))
