"""Plans that were built before: what is damaged is built again, and builders that share a folder do no harm."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splash_engines.tensorrt import segments
from splash_engines.tensorrt.cache import PlanCache
from splash_engines.tensorrt.plans import PlanSet, build_plans
from splash_engines.tensorrt.store import plan_bytes, read_plans, write_plans
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from tests.tensorrt.evaluated import api
from tests.tensorrt.test_plans import DEMO, only, small


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_config(DEMO)


def test_a_damaged_cache(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is cut short, changed or half there is built again."""
    only(monkeypatch, v_up=segments.v_up)
    known, cache = api(), PlanCache(tmp_path)
    times = []
    monkeypatch.setattr(known, "build", lambda *arguments: times.append(1) or b"a plan of some bytes")

    def build() -> bool:
        built = build_plans(known, model, small(), cache)
        (key,) = built.plans.plans
        assert cache.path(key).read_bytes() == b"a plan of some bytes"
        return key in built.cached

    assert [build(), build()] == [False, True]
    (plan,) = tmp_path.glob("*.plan")
    (entry,) = tmp_path.glob("*.json")
    for damage in (
        lambda: plan.write_bytes(plan.read_bytes()[:-1]),
        lambda: plan.unlink(),
        lambda: entry.write_text("{"),
        lambda: entry.write_text("[]"),
        lambda: entry.write_bytes(entry.read_bytes().replace(b"seconds", b"minutes")),
        lambda: entry.write_bytes(entry.read_bytes().replace(plan.stem.encode(), b"another plan's key")),
        lambda: entry.unlink(),
    ):
        damage()
        assert [build(), build()] == [False, True]
    assert len(times) == 8
    assert {path.name for path in tmp_path.iterdir()} == {plan.name, entry.name, "lock"}


def test_two_builders_of_one_cache(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorRT builds other bytes each time; each engine has the plans that its index names, whoever built them."""
    only(monkeypatch, v_up=segments.v_up)
    first, second = api(), api()
    others: list[PlanSet] = []

    def late(*arguments: Any) -> bytes:
        monkeypatch.setattr(second, "build", lambda *arguments: b"another builder's plan")
        others.append(build_plans(second, model, small(), PlanCache(tmp_path / "cache")).plans)
        return b"what comes second"

    monkeypatch.setattr(first, "build", late)
    cache = PlanCache(tmp_path / "cache")
    late_plans = build_plans(first, model, small(), cache).plans
    assert late_plans == others[0]
    (tmp_path / "engine").mkdir()
    write_plans(late_plans, cache, tmp_path / "engine")
    (plan,) = read_plans(tmp_path / "engine").plans.values()
    assert plan_bytes(tmp_path / "engine", plan) == b"another builder's plan"

    for damage, message in (
        (lambda: cache.path(plan.key).write_bytes(b"else"), "was changed while it was in use; build again"),
        (lambda: cache.path(plan.key).unlink(), "cannot be read: No such file or directory; build again"),
    ):
        damage()
        (tmp_path / message[:3]).mkdir()
        with pytest.raises(ValueError, match=message):
            write_plans(late_plans, cache, tmp_path / message[:3])


def test_what_a_killed_builder_leaves(tmp_path: Path) -> None:
    """Neither its lock nor the file that it was writing is in the way."""
    cache = PlanCache(tmp_path)
    killed = (
        "import fcntl, os, signal\n"
        f"file = open({str(tmp_path / 'lock')!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        f"open({str(tmp_path / 'writing')!r}, 'w').write('half a pl')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    (tmp_path / "key.plan").write_bytes(b"half a pl")  # named, but nothing says yet what it must be
    assert cache.find("key") is None
    entry = cache.add("key", b"a whole plan", 0.5)
    assert cache.find("key") == entry and cache.read("key", entry.checksum) == b"a whole plan"
    assert {path.name for path in tmp_path.iterdir()} == {"key.plan", "key.json", "lock"}
