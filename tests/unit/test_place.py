"""What ranks compute on: who gets a GPU, what is refused, and which defaults differ there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from splash_trt import environment
from splash_trt.calibrate import command
from splash_trt.config import EngineConfig
from splash_trt.dist import place
from splash_trt.dist.world import ThreadWorld
from splash_trt.llm import LLM
from splash_trt.memory.arena import Arena
from splash_trt.memory.map import memory_map
from splash_trt.models.families import load_config
from splash_trt.serve import ServeOptions, check_before_ranks, engine_config, warn_of_context

TINY = Path(__file__).resolve().parents[2] / "perf" / "configs" / "tiny"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many GPUs there seem to be."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


class TestChoice:
    @pytest.mark.parametrize(
        ("wish", "count", "ranks", "chosen"),
        [
            ("auto", 0, 2, "cpu"),
            ("auto", 1, 2, "cpu"),
            ("auto", 2, 2, "gpu"),
            ("auto", 4, None, "gpu"),
            ("auto", 0, None, "cpu"),
            ("cpu", 4, 2, "cpu"),
            ("gpu", 2, 2, "gpu"),
            ("shared-gpu", 1, 4, "gpu"),
            ("shared-gpu", 4, 2, "gpu"),
        ],
    )
    def test_gpus_where_every_rank_has_one(
        self, gpus: Any, wish: str, count: int, ranks: int | None, chosen: str
    ) -> None:
        gpus(count)
        assert place.choose(wish, ranks) == chosen

    def test_too_few_are_refused_with_both_numbers(self, gpus: Any) -> None:
        gpus(3)
        with pytest.raises(ValueError, match="^run_on: .*this node has 3 that its 4 ranks may use"):
            place.choose("gpu", 4)
        gpus(0)
        with pytest.raises(ValueError, match="^run_on: shared-gpu needs a GPU, and this node has none"):
            place.choose("shared-gpu", 4)

    def test_other_words_are_refused(self) -> None:
        with pytest.raises(ValueError, match="^run_on: 'tpu' is not one of auto, cpu, gpu, shared-gpu"):
            place.choose("tpu", 1)
        with pytest.raises(ValueError, match="^run_on: 'auto' is not one of cpu, gpu"):
            EngineConfig(run_on="auto")

    def test_a_share_of_the_smallest_memory_in_whole_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = iter([(1, 141 << 30), (1, (139 << 30) + 12345), (1, 140 << 30)])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: next(sizes))
        found = ThreadWorld(3).run(place.default_arena_bytes)
        assert len(set(found)) == 1 and found[0] % (2 << 20) == 0
        assert 0 <= ((139 << 30) + 12345) * place.MEMORY_SHARE - found[0] < 2 << 20

    def test_ranks_that_share_a_gpu_share_its_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 141 << 30))
        (alone,) = ThreadWorld(1).run(place.default_arena_bytes)
        (third,) = ThreadWorld(1).run(lambda world: place.default_arena_bytes(replace(world, ranks_on_device=3)))
        assert 0 <= alone - 3 * third < 8 << 20

    def test_ranks_ask_the_driver_what_their_gpus_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
        on_gpu, on_cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda:3", "cpu"))
        assert place.gpu_name(on_gpu) == "GPU 3" and place.gpu_name(on_cpu) is None


class TestServe:
    def test_defaults_on_gpus(self) -> None:
        model = load_config(TINY)
        options = ServeOptions(model=str(TINY), dummy_weights=0, ranks=2)
        on_gpu = engine_config(options, model, "gpu", 1 << 30)
        assert (on_gpu.run_on, on_gpu.dtype, on_gpu.memory_bytes) == ("gpu", "bfloat16", 1 << 30)
        assert (on_gpu.migration_max_slowdown, on_gpu.migration_bytes) == (0.005, 128 << 20)
        on_cpu = engine_config(options, model, "cpu", None)
        assert (on_cpu.run_on, on_cpu.dtype) == ("cpu", model.dtype)
        assert on_cpu.migration_max_slowdown == EngineConfig().migration_max_slowdown

    def test_what_is_given_counts_on_gpus_too(self) -> None:
        given: dict[str, Any] = {"dtype": "float32", "memory_bytes": 1 << 28, "operators": "own"}
        given |= {"simulate_routing": "uniform", "experts_cut": "inside"}
        config = engine_config(
            ServeOptions(model=str(TINY), dummy_weights=0, **given), load_config(TINY), "gpu", 1 << 30
        )
        assert {name: getattr(config, name) for name in given} == given

    def test_a_context_that_is_cut_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        model = load_config(TINY)
        for memory, asked in ((None, 100_000), (None, 4096), (None, None), (64 << 20, 4096)):
            options = ServeOptions(model=str(TINY), dummy_weights=0, max_context=asked, memory_bytes=memory)
            config = engine_config(options, model, "cpu", None)
            warn_of_context(model, config, 4096 if memory is None else 192)
        assert [record.getMessage() for record in caplog.records] == [
            "--max-context: 100000 is more than the model was made for, so it is 4096",
            "--max-context: 4096 is more than some layout's cache holds, so it is 192",
        ]

    def test_no_memory_is_not_the_default(self) -> None:
        options = ServeOptions(model=str(TINY), dummy_weights=0, memory_bytes=0)
        with pytest.raises(ValueError, match="^memory_bytes: 0 is not a whole number from 1 "):
            engine_config(options, load_config(TINY), "cpu", None)

    def test_more_memory_than_this_machine_has(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        none, limit = tmp_path / "max", tmp_path / "limit"
        none.write_text("max\n")
        limit.write_text(f"{3 << 30}\n")
        assert place.host_bytes(()) == place.host_bytes([none, tmp_path / "missing"]) > place.host_bytes([none, limit])
        assert place.host_bytes([limit]) == 3 << 30
        monkeypatch.setattr(place, "host_bytes", lambda: 3 << 30)
        options = ServeOptions(model=str(TINY), dummy_weights=0, ranks=2, run_on="cpu", port=0, memory_bytes=3 << 29)
        check_before_ranks(options)
        more = msgspec.structs.replace(options, memory_bytes=(3 << 29) + 1)
        with pytest.raises(ValueError, match=f"^memory_bytes: .* {3 << 30} .* of 2 ranks; give at most {3 << 29},"):
            check_before_ranks(more)
        check_before_ranks(msgspec.structs.replace(more, ranks=1))

    def test_memory_that_the_system_does_not_give(self) -> None:
        model, config = load_config(TINY), EngineConfig(memory_bytes=1 << 50)
        with pytest.raises(ValueError, match=f"^memory_bytes: .* {1 << 50} bytes; ask for less"):
            Arena(memory_map(model, config, 0))

    @pytest.mark.parametrize("text", ["", "\udcff"])
    @pytest.mark.parametrize("field", ["engine", "model", "name", "trace"])
    def test_text_that_is_none(self, field: str, text: str) -> None:
        fields: dict[str, Any] = {"model": str(TINY), "dummy_weights": 0, field: text}
        with pytest.raises(ValueError, match=f"^--{field}: .* must be text in UTF-8, and not empty"):
            check_before_ranks(ServeOptions(**fields))

    def test_experts_of_which_some_ranks_would_get_nothing_are_refused(self) -> None:
        """An intermediate size of 40."""
        options = ServeOptions(model=str(TINY), dummy_weights=0, ranks=41, run_on="cpu", experts_cut="inside")
        with pytest.raises(ValueError, match="^experts_cut: inside .* 41 ranks .* is 40; take fewer ranks or leave"):
            check_before_ranks(options)
        model = load_config(TINY)
        assert engine_config(msgspec.structs.replace(options, ranks=40), model, "cpu", None).num_ranks == 40
        assert engine_config(msgspec.structs.replace(options, experts_cut="whole"), model, "cpu", None).num_ranks == 41

    def test_too_few_gpus_are_refused_before_any_rank_starts(self, gpus: Any) -> None:
        gpus(1)
        with pytest.raises(ValueError, match="^run_on: .*has 1 that its 2 ranks"):
            check_before_ranks(ServeOptions(model=str(TINY), dummy_weights=0, ranks=2, run_on="gpu"))

    def test_gpus_that_nobody_described_are_refused_before_any_rank_starts(
        self, gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        gpus(2)
        options = ServeOptions(model=str(TINY), dummy_weights=0, ranks=2, port=0)
        monkeypatch.setattr("splash_trt.scheduler.devices._GPUS", tmp_path)
        check_before_ranks(options)  # the system lists none: the ranks will ask the driver
        (tmp_path / "0").mkdir()
        (tmp_path / "0" / "information").write_text("Model: Tesla T4\n")
        with pytest.raises(ValueError, match="^device: there is no description"):
            check_before_ranks(options)
        check_before_ranks(msgspec.structs.replace(options, device="h200"))

    def test_ranks_of_this_node_are_what_counts_under_mpirun(
        self, gpus: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """16 ranks on two nodes of 8 GPUs."""
        gpus(8)
        options = ServeOptions(model=str(TINY), dummy_weights=0, ranks=16, run_on="gpu", port=0)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "16")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "9")
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "8")
        check_before_ranks(options)
        monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_SIZE")
        assert environment.ranks_here() is None
        check_before_ranks(options)  # the ranks find out


@pytest.mark.parametrize(("wish", "told"), [("auto", "cpu"), ("cpu", "cpu"), ("shared-gpu", "shared-gpu")])
def test_ranks_that_calibrate_are_told_where(
    wish: str, told: str, gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One GPU and two ranks."""
    gpus(1)
    found: list[str] = []
    monkeypatch.setattr(command, "open_engine", lambda folder: SimpleNamespace(folder=folder))
    monkeypatch.setattr(command, "_start", lambda *arguments: found.append(arguments[-1]))
    with pytest.raises(SystemExit):
        command.calibrate_engine(tmp_path, 2, None, 1.0, None, wish, None)
    assert found == [told]


class TestOffline:
    def test_several_ranks_on_gpus_need_processes(self, gpus: Any) -> None:
        gpus(4)
        for wish in ("gpu", "shared-gpu"):
            with pytest.raises(ValueError, match="^run_on: .*mpirun -n 2"):
                LLM(TINY, ranks=2, run_on=wish, dummy_weights=0)
        with LLM(TINY, ranks=2, dummy_weights=0) as llm:
            assert llm.config.run_on == "cpu"

    def test_one_rank_takes_the_gpu_and_asks_it_for_its_memory(
        self, gpus: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to the point where the rank would be made on it."""
        gpus(1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 32))
        monkeypatch.setattr("splash_trt.llm.default_arena_bytes", lambda world: 1 << 31)
        made: list[Any] = []

        def start_worker(world: Any, model: Any, config: EngineConfig, *rest: Any) -> Any:
            made.append((world.device, config))
            return SimpleNamespace(world=world)

        monkeypatch.setattr("splash_trt.llm.start_worker", start_worker)
        monkeypatch.setattr("splash_trt.llm.Orchestrator.of", lambda *_: None)
        LLM(TINY, dummy_weights=0)
        ((device, config),) = made
        assert device == torch.device("cuda", 0)
        assert (config.run_on, config.memory_bytes, config.dtype) == ("gpu", 1 << 31, "bfloat16")
