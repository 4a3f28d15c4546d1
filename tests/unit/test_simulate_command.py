"""`splash-trt simulate`: what it prints, writes and draws, and what it says of wrong options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.planning import load_for_planning
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.devices import load_device
from splash_trt.simulate import grid
from splash_trt.simulate.command import simulate_command
from tests.oracles.published_configs import V32

MODEL = Path(__file__).parents[2] / "models" / "splash-tiny"
LOAD = "rollouts:prompts=3,samples=4,prompt_tokens=40,output_median=30,output_max=100"


def called(*arguments: str, load: str = LOAD, model: Path = MODEL) -> Result:
    base = ["--model", str(model), "--device", "cpu", "--ranks", "2", "--memory", "256M", "--dtype", "float32"]
    return CliRunner().invoke(simulate_command, [*base, "--trace", load, "--max-running", "16", *arguments])


def test_a_table_with_its_assumptions_and_the_same_as_json(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = called("--layouts", "auto,tp,dp", "--json", str(file), "--seed", "5")
    assert result.exit_code == 0, result.output
    firsts = [line.split(" ")[0] for line in result.output.splitlines()]
    assert firsts[firsts.index("layout") + 2 :][:4] == ["auto", "tp", "dp", "ceiling"]
    for part in ("auto against tp", "of the ceiling's speed", "seed=5", "no prefix cache", "round figures", "--memory"):
        assert part in result.output, part
    data = json.loads(file.read_text())
    by = {outcome["layout"]: outcome for outcome in data["outcomes"]}
    assert list(by) == ["auto", "tp", "dp", "ceiling"]
    assert all(outcome["requests"] == 12 for outcome in by.values())
    assert by["ceiling"]["makespan_s"] <= min(by["tp"]["makespan_s"], by["dp"]["makespan_s"])
    assert data["auto_faster_by"]["dp"]["makespan"] == by["dp"]["makespan_s"] / by["auto"]["makespan_s"]
    assert len(by["tp"]["series"]["time_s"]) == len(by["tp"]["series"]["cache"]) > 0


@pytest.mark.parametrize(("device", "said"), [("cpu", "may slow steps by 5%"), ("h200", "may slow steps by 0.5%")])
def test_switches_have_the_limit_of_ranks_on_such_devices(device: str, said: str) -> None:
    result = called("--layouts", "tp", "--device", device)
    assert result.exit_code == 0 and said in result.output, result.output


def test_the_same_command_prints_the_same() -> None:
    first = called("--layouts", "auto,tp,dp")
    assert first.exit_code == 0 and first.output == called("--layouts", "auto,tp,dp").output


def test_a_recorded_load(tmp_path: Path) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.5,40,3\n2024-01-01 00:00:02,9999,4\n"
        "2024-01-01 00:00:03,1,1\n"
    )
    result = called("--layouts", "cp", "--requests", "2", "--rate-scale", "2", load=str(trace))
    assert result.exit_code == 0, result.output
    assert "short: 2 requests" in result.output and "1 of 2 requests shortened" in result.output
    assert "2 times as fast" in result.output


def test_experts_that_are_cut_inside(tmp_path: Path) -> None:
    seconds = {}
    for cut, words in (("whole", "each whole on one rank"), ("inside", "a slice of each on every rank")):
        file = tmp_path / f"{cut}.json"
        result = called("--layouts", "tp", "--experts-cut", cut, "--json", str(file))
        assert result.exit_code == 0, result.output
        data = json.loads(file.read_text())
        assert data["assumptions"]["experts"] == words and words in result.output
        seconds[cut] = data["outcomes"][0]["makespan_s"]
    assert seconds["whole"] != seconds["inside"]


def test_auto_may_be_wrong_about_the_device() -> None:
    result = called("--layouts", "auto,tp,dp", "--policy-device", "h100")
    assert result.exit_code == 0, result.output
    assert "takes the devices for h100" in result.output


def test_pictures(tmp_path: Path) -> None:
    result = called("--layouts", "auto,tp,dp", "--plots", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    for name in ("timeline", "tpot", "map"):
        data = (tmp_path / "plots" / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20_000


@pytest.mark.parametrize(
    ("arguments", "load", "said"),
    [
        (["--layouts", "auto,ep"], LOAD, "'ep' is not one of auto, tp"),
        (["--objective", "speed"], LOAD, "--objective: 'speed'"),
        (["--device", "abacus"], LOAD, "--device: 'abacus'"),
        (["--policy-device", "abacus"], LOAD, "--policy-device: 'abacus'"),
        (["--migration-bytes", "0"], LOAD, "--migration-bytes: 0 is not"),
        (["--memory", "1M"], LOAD, "--memory: 1048576 is too small"),
        (["--memory-share", "0.5"], LOAD, "--memory-share:"),
        (["--ranks", "41", "--experts-cut", "inside"], LOAD, "--experts-cut: inside would leave some of 41 ranks"),
        (["--requests", "3"], LOAD, "as in rollouts:prompts=2"),
        (["--requests", "3"], "prompts:requests=2", "as in prompts:requests=2"),
        ([], "rollouts:speed=2", "--trace: rollouts has no 'speed'"),
        ([], "nonsense", "--trace: 'nonsense' is neither a file"),
        ([], "missing.csv", "--trace: 'missing.csv' is neither a file"),
        (["--rate-scale", "nan"], LOAD, "--rate-scale': 'nan' is not a number greater than 0 to 1000000"),
        (["--memory-share", "nan"], LOAD, "--memory-share': 'nan' is not a number greater than 0 to 1"),
        (["--max-context", "1"], LOAD, "--max-context: 1 is not a whole number of tokens from 2"),
        (["--layouts", "tp,dp"], "adversary:requests=20", "--layouts: an adversary needs 'auto'"),
        (["--max-batch-tokens", "4"], LOAD, "--max-batch-tokens: 4 is below max_running"),
        (["--json", "/nowhere/at/all.json"], LOAD, "--json: there is no folder"),
        (["--json", str(MODEL)], LOAD, "is a folder; name a file"),
        (["--plots", str(MODEL / "config.json")], LOAD, "--plots: "),
        (["--json", "/proc/nothing.json"], LOAD, "--json: /proc/nothing.json cannot be written: "),
        (["--plots", "/proc/nothing"], LOAD, "--plots: /proc/nothing cannot be made: "),
    ],
)
def test_wrong_options_are_named(arguments: list[str], load: str, said: str) -> None:
    result = called(*arguments, load=load)
    assert isinstance(result.exception, SystemExit) and result.exit_code != 0
    assert said in result.output and "makespan" not in result.output


def test_a_device_without_memory_needs_a_size() -> None:
    result = CliRunner().invoke(
        simulate_command, ["--model", str(MODEL), "--device", "cpu", "--ranks", "2", "--trace", LOAD]
    )
    assert result.exit_code != 0 and "--memory: cpu does not say" in result.output


def test_a_device_too_small_for_the_model_is_named_with_what_helps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V32))
    arguments = ["--model", str(tmp_path), "--device", "h200", "--ranks", "8", "--trace", LOAD]
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code != 0 and "--memory" not in result.output
    assert "--device: 90 % of 149,250,113,536 bytes are not enough: " in result.output
    assert result.output.endswith("take more ranks, more memory a rank, or smaller formats such as --weights fp8\n")


def test_the_map_is_the_cost_model_s() -> None:
    model, _ = load_for_planning(MODEL)
    config = EngineConfig(num_ranks=4, memory_bytes=64 << 20, max_running=64)
    cost = CostModel(model, config, load_device("cpu"))
    found = grid.best_layouts(model, config, cost, prompts=(0, 3000), contexts=(64, 4096), concurrencies=(1, 6, 4096))
    assert found.best.shape == (2, 3, 2)
    assert (found.best[:, 2, 1] == grid.NO_ROOM).all() and (found.gain >= 1).all()
    times = {layout: grid.seconds(cost, config, layout, 6, 64, 0) for layout in Layout}
    assert found.best[0, 1, 0] == min(times, key=lambda layout: times[layout])
    assert grid.seconds(cost, config, Layout.CP, 1, 64, 3000) > grid.seconds(cost, config, Layout.CP, 1, 64, 1000)


def test_a_shape_s_sums() -> None:
    batch = grid.shape(Layout.DP, 4, 6, 100, prompt_begin=1000, prompt_count=50)
    assert isinstance(batch, Batch)
    assert batch.decode_tokens.tolist() == [2, 2, 1, 1] and batch.decode_context.tolist() == [200, 200, 100, 100]
    assert batch.prefill_tokens.tolist() == [0, 0, 0, 50] and batch.prefill_context[3] == 1050
    assert batch.prefill_pairs[3] == np.arange(1001, 1051).sum()
