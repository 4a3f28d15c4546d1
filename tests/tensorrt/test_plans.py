"""Plans built on this machine by tensorrt_rtx: what is in them, what is shared, what is kept, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from splash_engines.inspect_engine import format_inspection, inspect_engine
from splash_engines.open import open_engine
from splash_engines.tensorrt import segments
from splash_engines.tensorrt.cache import PlanCache
from splash_engines.tensorrt.graph import Graph
from splash_engines.tensorrt.plans import Form, PlanSettings, build_plans
from splash_engines.tensorrt.segments import Lowering
from splash_engines.tensorrt.sizes import sizes_of
from splash_engines.tensorrt.store import plan_bytes, read_plans, use_of
from splash_engines.trt_api import BuildFailure
from splash_trt.commands.group import commands
from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from tests.tensorrt.evaluated import api

DEMO = Path(__file__).parents[2] / "models" / "splash-tiny"
TARGETS = ("sm_89", "sm_120")


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_config(DEMO)


def small(**changes: Any) -> PlanSettings:
    """A few plans that are quickly built."""
    given: dict[str, Any] = {
        "targets": ("sm_89",), "ranks": (2,), "layouts": (Layout.TP,), "max_batch_tokens": 64, "form": Form.PLUGIN,
    }  # fmt: skip
    return PlanSettings(**(given | changes))


def only(monkeypatch: pytest.MonkeyPatch, **lowered: Callable[..., None]) -> None:
    """The model has these segments alone."""
    monkeypatch.setattr(
        "splash_engines.tensorrt.plans.kinds_of", lambda model, sizes, form: [(kind, 0) for kind in lowered]
    )
    monkeypatch.setattr(segments, "SEGMENTS", lowered)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(commands, ["build", "--engine", "tensorrt", *arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The demo model's engine on 2 ranks, made by the command: (engine, cache, what was said)."""
    root = tmp_path_factory.mktemp("plans")
    done = command(
        "--model", str(DEMO), "--out", str(root / "engine"), "--target", ",".join(TARGETS), "--ranks", "2",
        "--plan-cache", str(root / "cache"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return root / "engine", root / "cache", done.output


def test_demo_model(built: tuple[Path, Path, str], model: ModelConfig) -> None:
    """All layouts on a machine without a GPU; plans lie in the engine and are named in its manifest."""
    folder, _, said = built
    plans = read_plans(folder)
    assert "plans by tensorrt_rtx 1.7.1.116 for sm_89, sm_120" in said and "Building plans" in said
    assert plans.settings.targets == TARGETS and plans.form is Form.PRIMITIVE
    assert all(plan_bytes(folder, plan)[:4] for plan in plans.plans.values())
    kinds = {plan.kind for plan in plans.plans.values()}
    assert kinds >= {"embed", "attention_in", "absorb", "v_up", "expand_kv", "attention_out", "dense_mlp", "head"}
    assert kinds >= {"moe", "attend_absorbed.4", "attend_absorbed.8", "attend_expanded.4"}
    engine = open_engine(folder)
    assert sum(file.name.startswith("plans/") for file in engine.manifest.files) == len(plans.plans) + 1
    assert f"{len(plans.plans)} by tensorrt_rtx" in format_inspection(inspect_engine(folder))


def test_what_is_shared(built: tuple[Path, Path, str]) -> None:
    """A plan serves all layers of a kind, ranks of equal sizes, and layouts that compute the same."""
    plans = read_plans(built[0])
    uses = {(use.layout, use.rank): use.plans for use in plans.uses}
    assert len(uses) == 8
    for layout in Layout:
        assert uses[layout, 0] == uses[layout, 1]
    heads = {"attend_absorbed.4", "attend_absorbed.8"}
    without = {key: {k: v for k, v in use.items() if k not in heads} for key, use in uses.items()}
    assert without[Layout.TP, 0] == without[Layout.DOP, 0] and uses[Layout.DP, 0] == uses[Layout.CP, 0]
    for kind in ("embed", "dense_mlp", "moe", "head"):
        assert len({use[kind] for use in uses.values()}) == 1
    assert uses[Layout.TP, 0]["attention_in"] != uses[Layout.DP, 0]["attention_in"]
    assert len(plans.plans) < 0.3 * sum(len(use) for use in uses.values())


def test_weights_and_pools_are_inputs(built: tuple[Path, Path, str]) -> None:
    plans = read_plans(built[0])
    full = plans.plans[use_of(plans, num_ranks=2, layout=Layout.DP, rank=1).plans["attention_in"]]
    shapes = {name: shape for name, shape, _ in full.inputs}
    assert shapes["own.q_b"] == shapes["others.q_b"] == (4, 48, 96)
    assert shapes["hidden"] == (-1, 256) and shapes["own.kv_a"] == (80, 256)
    absorbed = next(plan for plan in plans.plans.values() if plan.kind == "attend_absorbed.8")
    assert ("pool", (-1, 80), "BF16") in absorbed.inputs
    assert sum(plan.num_bytes for plan in plans.plans.values()) < 60e6
    with pytest.raises(ValueError, match="not for tp on 3"):
        use_of(plans, num_ranks=3, layout=Layout.TP, rank=0)


def test_again_from_the_cache(built: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Equal plans are not built twice, and equal engines have equal indexes."""
    folder, cache, _ = built
    arguments = ["--model", str(DEMO), "--target", ",".join(TARGETS), "--ranks", "2", "--plan-cache", str(cache)]
    done = command("--out", str(tmp_path / "again"), "--plans-only", *arguments)
    assert done.exit_code == 0 and "the others built in 0.0 s" in done.output
    seen = CliRunner().invoke(commands, ["inspect", str(tmp_path / "again")])
    assert "by tensorrt_rtx 1.7.1.116 for sm_89, sm_120" in seen.output and "plans alone" in seen.output, seen.output
    index = Path("plans") / "plans.json"
    assert (tmp_path / "again" / index).read_bytes() == (folder / index).read_bytes()
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["plans"]
    assert command("--out", str(tmp_path / "again"), "--plans-only", *arguments).exit_code != 0
    assert command("--out", str(tmp_path / "again"), "--plans-only", "--overwrite", *arguments).exit_code == 0


@pytest.mark.parametrize("whole", [True, False])
def test_verifying_reads_plans_to_their_ends(built: tuple[Path, Path, str], tmp_path: Path, whole: bool) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(built[0] if whole else built[0] / "plans", folder if whole else folder / "plans")
    plans = read_plans(folder).plans

    def verify() -> Any:
        return CliRunner().invoke(commands, ["inspect", str(folder), "--verify"])

    good = verify()
    assert good.exit_code == 0, good.output
    assert good.stdout.endswith(f"as built: {'every number, ' if whole else ''}all {len(plans)} plans\n")
    file = folder / "plans" / f"{list(plans)[-1]}.plan"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert verify().exit_code != 0 and f"{file}: was changed or damaged" in verify().output


def test_other_kinds_of_networks(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Float32, and sums over ranks inside: DistCollective layers where tokens are everywhere."""
    only(monkeypatch, attention_out=segments.attention_out)
    settings = small(dtype="float32", collectives_in=True, layouts=(Layout.TP, Layout.DP), ranks=(1, 2))
    plans = build_plans(api(), model, settings, PlanCache(tmp_path)).plans
    keys = {(use.num_ranks, use.layout): use.plans["attention_out"] for use in plans.uses if not use.rank}
    outputs = {use: plans.plans[key].outputs for use, key in keys.items()}
    assert outputs[2, Layout.TP] == (("sum", (-1, 256), "FLOAT"),)
    assert {outputs[key][0][0] for key in outputs if key != (2, Layout.TP)} == {"out"}


def test_what_a_key_depends_on(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything that changes a plan changes its key, and nothing else does."""
    only(monkeypatch, v_up=segments.v_up)
    known = api()
    monkeypatch.setattr(known, "build", lambda *arguments: b"plan")

    def key(settings: PlanSettings, given: ModelConfig = model) -> str:
        (found,) = build_plans(known, given, settings, PlanCache(tmp_path)).plans.plans
        return found

    base = key(small())
    assert base == key(small()) == key(small(layouts=(Layout.DOP,))) == key(small(form=Form.PRIMITIVE))
    assert base == key(small(), dataclasses.replace(model, vocab_size=999))
    others = [
        key(small(targets=("sm_120",))),
        key(small(targets=TARGETS)),
        key(small(max_batch_tokens=65)),
        key(small(dtype="float32")),
        key(small(ranks=(4,))),
        key(small(layouts=(Layout.DP,))),
        key(small(), dataclasses.replace(model, v_head_dim=40)),
    ]
    monkeypatch.setattr(known, "version", "1.8")
    others.append(key(small()))
    assert len({base, *others}) == len(others) + 1


@pytest.mark.parametrize("tokens", [64, 8192])
def test_a_servers_blocks_of_context_are_in_the_profiles(model: ModelConfig, tokens: int) -> None:
    config = EngineConfig(num_ranks=2, max_batch_tokens=tokens, max_running=tokens, run_on="gpu")
    for profile in small(max_batch_tokens=tokens).profiles(model):
        assert profile["C"][2] >= config.context_block


def test_a_damaged_engine(built: tuple[Path, Path, str], tmp_path: Path) -> None:
    source = built[0] / "plans"
    folder = tmp_path / "engine"
    (folder / "plans").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no plans for TensorRT"):
        read_plans(folder)
    index = folder / "plans" / "plans.json"
    text = (source / "plans.json").read_bytes()
    for wrong, message in (
        (text[:-9], "damaged, cut short"),
        (text.replace(b"attention_in", b"attention_on"), "its checksum differs"),
        (text.replace(b'"version":1', b'"version":2'), "this program reads"),
    ):
        index.write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            read_plans(folder)
    index.write_bytes(text)
    plan = next(iter(read_plans(folder).plans.values()))
    data = (source / f"{plan.key}.plan").read_bytes()
    (folder / "plans" / f"{plan.key}.plan").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="was changed or damaged"):
        plan_bytes(folder, plan)


def wrong_types(g: Graph, model: ModelConfig, w: Any) -> None:
    with g.scope("sums", operation="wrong"):
        g.output("y", g.binary("SUM", g.input("x", ("T", 4)), g.input("z", ("T", 4), "int32")))


def wrong_shapes(g: Graph, model: ModelConfig, w: Any) -> None:
    with g.scope("product", operation="wrong"):
        g.output("y", g.matmul(g.input("x", ("T", 4)), g.input("z", (5, 4))))


def too_many(g: Graph, model: ModelConfig, w: Any) -> None:
    """A network that is well formed, and that the builder has no implementation for."""
    with g.scope("largest", operation="topk"):
        g.output("y", g.topk(g.cast(g.input("x", ("T", 9000)), "float32"), 8000, 1)[0])


@pytest.mark.parametrize(
    ("segment", "node"),
    [(wrong_types, "head/sums/sum"), (wrong_shapes, "head/product/matmul"), (too_many, "head/largest/topk")],
)
def test_failures_name_segment_and_node(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, segment: Callable[..., None], node: str
) -> None:
    only(monkeypatch, head=segment)
    with pytest.raises(BuildFailure) as failed:
        build_plans(api(), model, small(), PlanCache(tmp_path))
    assert (failed.value.network, failed.value.node) == ("head", node), str(failed.value)
    assert not list(tmp_path.glob("*.plan"))
    done = command(
        "--model", str(DEMO), "--out", str(tmp_path / "out"), "--target", "sm_89", "--plan-cache", str(tmp_path)
    )
    assert done.exit_code != 0 and f"head: node {node}: " in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_an_interrupted_build(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorRT stops at the next step, and what was raised is raised."""
    only(monkeypatch, attention_in=segments.attention_in)
    told: list[tuple[str, float]] = []

    def progress(kind: str, done: float) -> None:
        told.append((kind, done))
        if done > 0.05:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_plans(api(), model, small(), PlanCache(tmp_path), progress)
    assert not list(tmp_path.iterdir())
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert {kind for kind, _ in told} == {"attention_in"}


def test_an_interruption_as_soon_as_the_build_has_begun(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It must not wait for the whole build."""
    only(monkeypatch, attention_in=segments.attention_in)

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *call: Any, **more: Any) -> Any:
            super().submit(*call, **more)
            raise KeyboardInterrupt

    monkeypatch.setattr("splash_engines.tensorrt.plans.ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_plans(api(), model, small(), PlanCache(tmp_path))
    assert not list(tmp_path.iterdir()), "the build went on to its end"


def test_a_signal_while_tensorrt_is_at_work(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever TensorRT is when it comes: its bindings swallow what a function that they call raises."""
    only(monkeypatch, attention_in=segments.attention_in)

    def interrupted(delay: float) -> bool:
        began: list[str] = []

        def progress(kind: str, done: float) -> None:
            if done > 0.05 and not began:
                began.append(kind)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()

        try:
            for _ in range(3):  # longer than the delay: a signal that was lost must not come after this
                build_plans(api(), model, small(), PlanCache(tmp_path), progress)
                shutil.rmtree(tmp_path)
            time.sleep(1)
        except KeyboardInterrupt:
            return True
        return False

    # A shell starts what runs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for delay in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1) * 3:
            assert interrupted(delay), "the interruption was lost"
    finally:
        signal.signal(signal.SIGINT, before)


def test_nodes_say_what_they_are(model: ModelConfig) -> None:
    """Paths are unique, begin with the segment, and metadata is JSON of what the node is for."""
    known = api()
    lowering = Lowering(api=known, builder=known.create_builder(), model=model, dtype="bfloat16", num_ranks=2)
    sizes = sizes_of(model, Layout.TP, 0, 2, 64)
    operations = set()
    for kind in segments.SEGMENTS:
        graph = lowering(kind, sizes)
        assert graph is not None
        network = graph.network
        assert network.name == kind
        assert network.get_flag(known.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        paths = [layer.name for layer in layers]
        assert len(set(paths)) == len(paths) and all(path.startswith(f"{kind}/") for path in paths)
        for layer in layers:
            meaning = json.loads(layer.metadata)
            assert meaning["segment"] == kind and meaning["primitive"]
            operations.add(meaning.get("operation"))
            if meaning.get("collective"):
                assert meaning["ranks"] == [0, 1] and layer.num_ranks == 2
    assert operations >= {"embed", "rms_norm", "linear", "apply_rope", "absorb", "v_up", "expand", "o_proj", "route",
                          "silu_mul", "gated_mlp", "grouped_experts"}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_90"], "--target: sm_90 is none that"),
        (["--target", "sm_75,sm_89"], "--target: sm_75 is none that"),
        ([], "--target: this machine has no GPU"),
        (["--target", "sm_89", "--ranks", "two"], "--ranks: 'two' must be numbers"),
        (["--target", "sm_89", "--ranks", "0"], "--ranks: '0' must be one or more numbers from 1 to 1024"),
        (["--target", "sm_89", "--ranks", ""], "--ranks: '' must be one or more"),
        (["--target", "sm_89", "--ranks", "1025"], "--ranks: '1025' must be"),
        (["--target", "sm_89", "--max-batch-tokens", "4000000000"], "--max-batch-tokens: 4000000000 is not from 1 to"),
        (["--target", "sm_89", "--page-tokens", "4000000000"], "--page-tokens: 4000000000 is not from 1 to 4096"),
        (["--target", "sm_89", "--layouts", "tp,ep"], "--layouts: 'ep'"),
        (["--target", "sm_89", "--dtype", "float64"], "--dtype': 'float64' is not one of 'bf16', 'float32'"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splash_engines.tensorrt.build.this_gpu", lambda: None)
    done = command("--model", str(DEMO), "--out", str(tmp_path / "engine"), *arguments)
    assert done.exit_code != 0 and message in done.output, done.output


def test_what_is_wrong_with_the_place_is_said_before_plans_are_built(
    built: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splash_engines.tensorrt.build.build_for_checkpoint", lambda *_, **__: pytest.fail("built"))
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "mine").touch()
    for out, more, message in (
        (built[0], [], "is an engine already; replace it with --overwrite"),
        (tmp_path / "things", ["--overwrite", "--plans-only"], "holds other things than an engine"),
    ):
        done = command("--model", str(DEMO), "--out", str(out), "--target", "sm_89", *more)
        assert done.exit_code != 0 and message in done.output, done.output


@pytest.mark.parametrize("given", [["--target", "sm_89"], ["--plans-only"], ["--form", "plugin"], ["--dtype", "bf16"]])
def test_options_of_plans_without_plans(given: list[str], tmp_path: Path) -> None:
    arguments = ["build", "--model", str(DEMO), "--out", str(tmp_path / "out"), *given]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code != 0 and f"{given[0]} is of plans, which --engine tensorrt builds" in done.output
    assert not (tmp_path / "out").exists()
