"""Switching between ranks on GPUs: the tokens that a CPU gives, the fewest bytes, and nothing left behind.

Where there are fewer GPUs than ranks, ranks share them, and take turns; see gpu_world.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from splash_trt.llm import LLM
from splash_trt.request import Request, SamplingParams
from tests.mpi import gpu_switching_cases as cases
from tests.mpi.world import ROOT, Ranks
from tests.switching.harness import make_requests, never_switched, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
DEMO = ROOT / "models" / "splash-tiny"


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def check(found: list[dict[str, Any]], expected: dict[str, list[int]]) -> None:
    assert found[0]["told"] == expected
    assert len(found[0]["pairs"]) >= 4, found[0]["pairs"]
    check_sent(found)


def check_sent(found: list[dict[str, Any]]) -> None:
    """What the ranks' movers sent is what the switches recorded."""
    for kind, recorded in found[0]["recorded"].items():
        assert sum(mine["sent"][kind] for mine in found) == recorded, kind


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 1), ("float32", 2), ("float64", 3)])
def test_a_random_model_says_under_random_switches_what_a_cpu_says(
    ranks: Ranks, folder: Path, dtype: str, seed: int
) -> None:
    requests = make_requests(40)
    config = {"dtype": dtype, "migration_bytes": 30000, "migration_max_slowdown": 1000.0}
    built = [msgspec.to_builtins(request) for request in requests]
    found = ranks.run(cases.random_switches, str(folder), built, config, seed, timeout_s=240)
    check(found, {name: told.tokens for name, told in never_switched(folder, requests).items()})


def test_a_model_without_shared_experts(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing runs beside its steps, which a graph must not wait for."""
    requests, folder = make_requests(16), write_model(tmp_path, n_shared_experts=0)
    config = {"dtype": "float32", "migration_bytes": 30000}
    built = [msgspec.to_builtins(request) for request in requests]
    found = ranks.run(cases.random_switches, str(folder), built, config, 2, timeout_s=120)
    assert found[0]["told"] == {name: told.tokens for name, told in never_switched(folder, requests).items()}


@pytest.mark.parametrize("heads", [17, 33])
def test_heads_that_do_not_divide(ranks: Ranks, tmp_path: Path, heads: int) -> None:
    """On two ranks 9 and 8, 17 and 16: the wider part of an exchange has more chunks than the other one."""
    folder = write_model(tmp_path, num_attention_heads=heads, kv_lora_rank=512)
    requests, layouts = make_requests(8), ["dop", "tp", "dp"]
    built = [msgspec.to_builtins(request) for request in requests]
    config = {"dtype": "float32", "layout": "dop", "dop_absorbed_tokens": 3}
    found = ranks.run(cases.in_layouts, str(folder), built, config, 60, layouts, timeout_s=120)
    expected = {name: told.tokens for name, told in never_switched(folder, requests).items()}
    for layout in layouts:
        assert {name: tokens for name, (tokens, _) in found[0][layout].items()} == expected, layout


def test_new_tables_and_moved_pages_in_one_plan(ranks: Ranks, folder: Path) -> None:
    requests = make_requests(45)
    built = [msgspec.to_builtins(request) for request in requests]
    config = {"dtype": "float32", "migration_bytes": 30000, "max_running": 24, "max_batch_tokens": 256}
    found = ranks.run(cases.compacting, str(folder), built, config, timeout_s=120)[0]
    assert found["inside"] > 0 and found["twice"] > 0, "no plan told a place twice"
    expected = never_switched(folder, requests)
    assert len(found["ended"]) > 4
    for name, tokens in found["told"].items():
        whole = expected[name].tokens
        assert tokens == (whole if name in found["ended"] else whole[: len(tokens)]), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_requests_that_went_wrong_spare_the_others(ranks: Ranks, tmp_path: Path, bad: float) -> None:
    """With head dims for Hopper's own kernels, in bfloat16: to the bit, what the same steps tell without them."""
    dims = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"), 64)
    folder, bad_id, layouts = write_model(tmp_path, **dims), 77, ["tp", "dp", "cp", "dop"]
    good = [request for request in make_requests(16, max_tokens=8) if bad_id not in request.prompt]
    both = []
    for i, request in enumerate(good):
        prompt = tuple(bad_id if k % 3 == 0 else k for k in range(7 * i + 1))
        both += [Request(id=f"bad{i}", prompt=prompt, sampling=request.sampling), request]
    built = [msgspec.to_builtins(request) for request in both]
    config = {"dtype": "bfloat16", "max_batch_tokens": 256, "context_block_tokens": 512}
    clean, found = (
        ranks.run(cases.beside_bad_ones, str(folder), built, config, bad_id, value, layouts, timeout_s=120)[0]
        for value in (0.5, bad)
    )
    for layout in layouts:
        assert all(math.isnan(logprob) for logprob in found[layout]["bad3"][1]), "nothing went wrong"
        for request in good:
            assert found[layout][request.id] == clean[layout][request.id], (layout, request.id)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_demo_model_says_under_random_switches_what_a_cpu_says(size: int) -> None:
    prompts = [[(11 * i + 5 * k) % 250 for k in range(1 + 9 * i)] for i in range(16)]
    wishes = [SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(16)]
    with LLM(DEMO, ranks=1, layout="tp", run_on="cpu", dtype="float32") as llm:
        expected = [list(completion.tokens) for completion in llm.generate(prompts, wishes)]
    requests = [Request(id=f"{i:02d}", prompt=tuple(prompts[i]), sampling=wishes[i]) for i in range(16)]
    config = {"dtype": "float32", "migration_bytes": 1 << 20}
    built = [msgspec.to_builtins(request) for request in requests]
    with closing(Ranks(size)) as ranks:
        found = ranks.run(cases.random_switches, str(DEMO), built, config, 5, timeout_s=240)
    check(found, {f"{i:02d}": tokens for i, tokens in enumerate(expected)})


@pytest.mark.parametrize("budget", [12000, 1 << 30])
def test_bytes_are_minimal_on_a_tour_of_all_pairs(ranks: Ranks, folder: Path, budget: int) -> None:
    found = ranks.run(cases.tour_of_least_bytes, str(folder), {"migration_bytes": budget}, timeout_s=240)
    assert len(found[0]["bytes"]) == 12
    for heads, rows, sent_heads, sent_rows in found[0]["bytes"]:
        assert (sent_heads, sent_rows) == (heads, rows)
    check_sent(found)


def test_a_hundred_switches_leave_nothing_behind(ranks: Ranks, folder: Path) -> None:
    for mine in (found := ranks.run(cases.switch_often, str(folder), 100, timeout_s=400)):
        before, after = mine["used"]
        assert after["gpu"] <= before["gpu"] + (8 << 20)
        assert after["torch"] <= before["torch"] + (4 << 20)
        assert after["rss"] <= before["rss"] + (32 << 20)
    assert found[0]["outcomes"] == ["committed"]
