"""The benchmark harness: how it takes times, what it refuses to keep, and that a block of steps is what it says."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from perf import harness, report
from perf.engines.bench import Bench, bench_config
from perf.engines.step_ranks import CONFIGS, Findings, Settings
from perf.engines.step_time import parse, same_tokens, settings_of
from splash_trt.config import Layout
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.models.families import load_config
from splash_trt.plan import Plan

HARDWARE = harness.Hardware(cpu="a CPU", cores=2, memory_gib=4, gpus=())
SOFTWARE = harness.Software(system="Linux", python="3.11", torch="2.9", numpy="2", mpi4py="4", mpi="Open MPI 5")
COMMIT = harness.Commit(id="0123456789abcdef", dirty=False)


def provenance(**changes: Any) -> harness.Provenance:
    fields: dict[str, Any] = {
        "hardware": HARDWARE,
        "software": SOFTWARE,
        "commit": COMMIT,
        "config": {"batch": 1},
        "command": "python -m perf.thing",
        "date_utc": "2026-01-01T00:00:00Z",
        "remark": "quiet",
    }
    return harness.Provenance(**fields | changes)


def result(**changes: Any) -> harness.Result:
    rows = [
        {"n": n, "batch": batch, "layout": layout, "ms": 1.5 * batch * scale, "ratio": scale}
        for n in (2, 4)
        for batch in (1, 4)
        for layout, scale in (("tp", 1.0), ("dp", 2.0))
    ]
    fields: dict[str, Any] = {
        "schema": harness.SCHEMA_VERSION,
        "area": "engines",
        "name": "thing",
        "title": "A thing",
        "provenance": provenance(),
        "check": harness.Check(what="sums agree", passed=True, detail="to 0 ulp"),
        "view": harness.View(x="batch", y="ms", series="layout", panels=("n",), ratio="ratio"),
        "rows": rows,
    }
    return harness.Result(**fields | changes)


class TestTiming:
    def test_variants_take_turns_and_warm_up_rounds_are_dropped(self) -> None:
        calls: list[str] = []

        def variant(name: str) -> Any:
            def sample() -> list[float]:
                calls.append(name)
                return [float(len(calls))]

            return sample

        samples = harness.interleave({name: variant(name) for name in "abc"}, warmup=1, repeats=3)
        assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
        assert samples == {"a": [[6], [8], [10]], "b": [[4], [9], [11]], "c": [[5], [7], [12]]}

    def test_timed_takes_the_time_of_one_call(self) -> None:
        ticks = iter([10.0, 12.5])
        called: list[int] = []
        assert harness.timed(lambda: called.append(1), clock=lambda: next(ticks))() == [2.5]
        assert called == [1]

    def test_summary_is_over_all_rounds_in_milliseconds(self) -> None:
        found = harness.summary([[i / 1000 for i in range(6)], [i / 1000 for i in range(6, 11)]])
        assert found == pytest.approx({"median_ms": 5, "p10_ms": 1, "p90_ms": 9, "samples": 11})

    def test_ratio_compares_within_rounds(self) -> None:
        """The machine was three times slower in the second round, and the quotient does not see it."""
        assert harness.ratio([[2.0, 2.0], [6.0]], [[1.0], [3.0, 3.0, 9.0]]) == 2.0


class TestKeeping:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = harness.write(result(), tmp_path)
        assert path == tmp_path / "engines" / "thing.json"
        assert harness.read(path) == result()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"check": harness.Check(what="", passed=True, detail="")}, "no correctness check"),
            ({"check": harness.Check(what="sums", passed=False, detail="off by 3")}, "off by 3"),
            ({"provenance": provenance(command="")}, "command is empty"),
            ({"provenance": provenance(config={})}, "config is empty"),
            ({"provenance": provenance(commit=harness.Commit(id="", dirty=False))}, "commit is empty"),
            ({"provenance": provenance(date_utc="")}, "date_utc is empty"),
            ({"rows": []}, "rows"),
            ({"schema": 0}, "schema 0"),
            ({"name": "../thing"}, "a-z"),
        ],
    )
    def test_refused(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            harness.write(result(**changes), tmp_path)
        assert not list(tmp_path.rglob("*.json"))

    @pytest.mark.parametrize("missing", ["provenance", "check", "schema"])
    def test_a_file_without_it_is_refused(self, tmp_path: Path, missing: str) -> None:
        path = harness.write(result(), tmp_path)
        data = msgspec.json.decode(path.read_bytes())
        del data[missing]
        path.write_bytes(msgspec.json.encode(data))
        with pytest.raises(ValueError, match=missing):
            harness.read(path)

    def test_no_name_of_the_machine(self, tmp_path: Path) -> None:
        for text in (str(harness.ROOT), f"under {harness.ROOT}/perf", f"{Path.home()}/x"):
            with pytest.raises(ValueError, match="of this machine"):
                harness.write(result(provenance=provenance(remark=text)), tmp_path)

    def test_a_failed_check_is_recorded_as_one(self) -> None:
        def fails() -> str:
            raise AssertionError("row 3 differs")

        assert harness.checked("rows agree", fails) == harness.Check(
            what="rows agree", passed=False, detail="row 3 differs"
        )
        assert harness.checked("rows agree", lambda: "8 rows").passed


class TestProvenance:
    def test_this_machine(self) -> None:
        p = harness.provenance({"a": 1}, "perf.thing", ["--remark", "two words"], "")
        assert p.command == "python -m perf.thing --remark 'two words'"
        assert p.hardware.cpu and p.hardware.cores >= 1 and p.hardware.memory_gib >= 1
        assert p.software.torch.split("+")[0] == torch.__version__.split("+")[0]  # the build may be unsaid

    @pytest.mark.parametrize(
        ("arguments", "left"),
        [
            (["--layouts", "tp", "dp", "--remark", "tp"], ["--layouts", "tp", "dp"]),
            (["--remark", "two words", "--ranks", "2", "--remark", "more"], ["--ranks", "2"]),
            (["--remark=--ranks", "--ranks", "2", "--results=a=b"], ["--ranks", "2"]),
            (["--results", "here", "--remarkable", "--remark"], ["--remarkable"]),
        ],
    )
    def test_options_are_dropped_with_their_values(self, arguments: list[str], left: list[str]) -> None:
        assert harness.without(arguments, "--remark", "--results") == left

    def test_dirty_trees_are_told_from_clean_ones(self, tmp_path: Path) -> None:
        def git(*arguments: str) -> None:
            who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
            subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

        git("init")
        (tmp_path / "code.py").write_text("1")
        git("add", "code.py")
        git("commit", "-m", "one")
        (tmp_path / "perf" / "results").mkdir(parents=True)
        (tmp_path / "perf" / "results" / "new.json").write_text("{}")
        clean = harness.commit(tmp_path)
        assert not clean.dirty and len(clean.id) == 40
        (tmp_path / "other.py").write_text("2")
        assert harness.commit(tmp_path) == harness.Commit(id=clean.id, dirty=True)


class TestReport:
    def test_table(self) -> None:
        text = report.markdown(result())
        assert "| n | batch | tp | dp |" in text
        assert "| 4 | 4 | 6 (1.00) | 12 (2.00) |" in text
        assert "`python -m perf.thing`" in text and "sums agree: passed" in text

    def test_a_panel_has_a_line_for_each_layout(self) -> None:
        found = report.lines(result())
        assert list(found) == ["n 2", "n 4"]
        assert found["n 4"] == {"tp": ([1, 4], [1.5, 6]), "dp": ([1, 4], [3, 12])}

    def test_the_table_is_written_beside_the_result(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plotted: list[Path] = []
        monkeypatch.setattr(report, "plot", lambda result, path: plotted.append(path))
        path = harness.write(result(), tmp_path)
        assert report.main([str(path)]) == 0
        assert "A thing" in path.with_suffix(".md").read_text()
        assert plotted == [path.with_suffix(".png")]

    def test_an_unchecked_result_gets_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "bare.json"
        path.write_text('{"rows": []}')
        assert report.main([str(path)]) == 1
        assert "refused: bare.json" in capsys.readouterr().err
        assert not path.with_suffix(".md").exists()


class TestStepTime:
    def test_a_block_is_as_many_full_decode_steps_as_asked_for(self) -> None:
        """Two ranks, each layout: what the runner gets is only decodes of the whole batch, at the context asked for."""
        torch.set_num_threads(1)
        model = load_config(CONFIGS / "tiny")
        config = bench_config(model, num_ranks=2, dtype="float32", cache_tokens=1024, max_running=4, page_tokens=16)

        def program(world: World) -> list[Plan]:
            bench = Bench(world, CONFIGS / "tiny", config)
            if world.rank:
                bench.follow()
                return []
            plans: list[Plan] = []
            send = bench.worker.send
            bench.worker.send = lambda plan: (plans.append(plan), send(plan))[1]  # type: ignore[method-assign]
            for layout in Layout:
                assert len(bench.decode(layout, batch=3, context=100, steps=2, warmup=1)) == 2
                # A turn tells of the step launched in the one before it: two are too few for a share from 0 on.
                assert bench.idle < 1 and bench.idle != 0
            bench.release()
            return plans

        plans = ThreadWorld(2).run(program)[0]
        assert [p.layout for p in plans] == [layout for layout in Layout for _ in range(len(plans) // 4)]
        assert 3 <= len(plans) // 4 <= 5
        assert all(p.count.tolist() == [1, 1, 1] and p.absorbed.all() for p in plans)
        assert all(100 <= start < 112 for p in plans for start in p.start.tolist())

    def test_layouts_and_ranks_are_held_to_the_same_tokens(self) -> None:
        def findings(ranks: int, **tokens: list[list[int]]) -> Findings:
            return Findings(decode=[{"ranks": ranks}], prefill=[], tokens=tokens)

        agreed = [findings(1, tp=[[1, 2], [3]]), findings(2, tp=[[1, 2], [3]], dp=[[1, 2], [3]])]
        assert same_tokens(agreed) == "the same 3 tokens from tp on 1, tp on 2, dp on 2 ranks"
        with pytest.raises(AssertionError, match="cp on 4 ranks differs from tp on 1"):
            same_tokens([*agreed, findings(4, cp=[[1, 2], [4]])])

    def test_one_rank_runs_one_layout(self) -> None:
        options = parse(["--batches", "1", "2"])
        assert settings_of(options, 1).layouts == ("tp",)
        four = settings_of(options, 4)
        assert isinstance(four, Settings) and four.layouts == ("tp", "dp", "cp", "dop") and four.batches == (1, 2)


def test_all_commands_are_listed() -> None:
    """A module that says how it is called is in perf/README.md's table; those that others start say nothing."""
    table = (harness.ROOT / "perf" / "README.md").read_text()
    commands = set()
    for path in sorted((harness.ROOT / "perf").rglob("*.py")):
        name = ".".join(path.relative_to(harness.ROOT).with_suffix("").parts)
        text = path.read_text()
        called = f"python -m {name}" in (ast.get_docstring(ast.parse(text)) or "")
        if called and "__name__ ==" in text:
            commands.add(name)
    assert len(commands) > 15
    assert [name for name in sorted(commands) if not re.search(rf"^\| `[^`]*-m {name}\b[^`]*` \|", table, re.M)] == []
