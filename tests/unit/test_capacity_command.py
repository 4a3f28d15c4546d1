"""`splash-trt capacity`: its figures are the server's, and hold against sums from the published sizes."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.capacity.command import capacity_command
from splash_trt.capacity.report import Lengths, largest_batch
from splash_trt.capacity.table import format_count
from splash_trt.commands.group import COMMANDS, commands
from splash_trt.config import EXPERTS_CUTS, EngineConfig, Formats, Layout
from splash_trt.dist.place import MEMORY_SHARE
from splash_trt.layout.spec import PlacementKind
from splash_trt.memory.map import Capacity, capacity, memory_map
from splash_trt.scheduler.devices import load_device
from tests.oracles.published_configs import GLM, GLM_5, V3, V32, parse

SMALL = {**V32, "num_hidden_layers": 6}
RUNS = settings(deadline=None, derandomize=True)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(capacity_command, list(arguments))


def report(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def written(tmp_path: Path) -> dict[str, str]:
    """Paths of config.json files by name."""
    found = {}
    for name, base in (("v3", V3), ("v32", V32), ("glm", GLM), ("glm5", GLM_5), ("small", SMALL)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(base))
        found[name] = str(folder / "config.json")
    return found


def by_layout(case: Any) -> dict[str, Any]:
    return {room["layout"]: room for room in case["layouts"]}


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_figures_are_the_servers(written: dict[str, str], ranks: int) -> None:
    memory = 100 << 30
    found = report("--model", written["glm"], "--memory", "100G", "--ranks", str(ranks), "--page-tokens", "32")
    model = parse(GLM)
    config = EngineConfig(num_ranks=ranks, dtype="bfloat16", memory_bytes=memory, page_tokens=32)
    (case,) = found["cases"]
    assert case["formats"] == {"weights": "bfloat16", "attention": "bfloat16", "cache": "bfloat16"}
    rooms = by_layout(case)
    assert list(rooms) == ["tp", "dp", "cp", "dop"]
    for layout in Layout:
        expected, room = capacity(model, config, layout), rooms[layout.name.lower()]
        assert room["total_tokens"] == expected.total_tokens
        assert room["tokens_per_rank"] == [32 * pages for pages in expected.pages_per_rank]
        assert room["request_tokens"] == expected.request_tokens
    for rank, by_kind in enumerate(case["weights_bytes"]):
        m = memory_map(model, config, rank)
        assert by_kind["attention_others"] == m.others_bytes
        assert sum(by_kind.values()) == m.own_bytes + m.others_bytes
    assert (case["workspace_bytes"], case["page_bytes"]) == (m.workspace_bytes, m.page_bytes)


def test_experts_that_are_cut_inside(written: dict[str, str]) -> None:
    """64 experts on 3 ranks: 22, 21 and 21 whole ones, or a third of each on all."""
    fixed = ("--model", written["glm"], "--memory", "100G", "--ranks", "3")
    model, fields = parse(GLM), {"num_ranks": 3, "dtype": "bfloat16", "memory_bytes": 100 << 30}
    experts, words = {}, {}
    for cut in EXPERTS_CUTS:
        found = report(*fixed, "--experts-cut", cut)
        (case,) = found["cases"]
        config = EngineConfig(**fields, experts_cut=cut)
        for room in case["layouts"]:
            assert room["total_tokens"] == capacity(model, config, Layout.parse(room["layout"])).total_tokens
        experts[cut] = [by_kind["experts"] for by_kind in case["weights_bytes"]]
        words[cut] = found["assumptions"]["experts"]
    assert words == {"whole": "each whole on one rank", "inside": "a slice of each on every rank"}
    assert sum(experts["whole"]) == pytest.approx(sum(experts["inside"]), rel=1e-3)
    assert experts["whole"][0] / experts["whole"][2] == pytest.approx(22 / 21)
    assert len(set(experts["inside"])) == 1


def hand_percent(base: dict[str, Any], memory: float, attention: int) -> float:
    """DOP's extra tokens in percent on 8 ranks, from the published sizes: FP8 weights with their scales left out."""
    hidden, heads, q, latent = (
        base[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = base["qk_nope_head_dim"], base["qk_rope_head_dim"], base["v_head_dim"]
    layers, dense = base["num_hidden_layers"], base["first_k_dense_replace"]
    head_cut = heads * ((nope + rope) * q + (nope + value) * latent + value * hidden)
    index_q, index_k = base["index_n_heads"] * base["index_head_dim"] * q, base["index_head_dim"] * hidden
    every = hidden * (q + latent + rope) + index_q + index_k
    kept = (layers - dense) * base["n_routed_experts"] * hidden + layers * base["index_n_heads"] * hidden
    mlp = (layers - dense) * 257 * 3 * hidden * base["moe_intermediate_size"]
    mlp += dense * 3 * hidden * base["intermediate_size"]
    ends = 2 * 2 * base["vocab_size"] * hidden
    own = mlp / 8 + layers * head_cut * attention / 8 + layers * every + 2 * kept + ends / 8
    others = layers * head_cut * attention * 7 / 8

    return 100 * ((memory - own) / (memory - own - others) - 1)


@pytest.mark.parametrize(("attention", "number"), [("fp8", 1), ("bf16", 2)])
@pytest.mark.parametrize(("name", "base", "device"), [("v32", V32, "h200"), ("glm5", GLM_5, "b200")])
def test_published_models_against_their_sizes(
    written: dict[str, str], name: str, base: dict[str, Any], device: str, attention: str, number: int
) -> None:
    fixed = ("--model", written[name], "--device", device, "--ranks", "8", "--weights", "fp8")
    memory = 0.9 * load_device(device).memory_bytes
    for cache in ("bf16", "fp8"):
        found = report(*fixed, "--attention", attention, "--cache", cache)
        (case,) = found["cases"]
        assert found["memory_bytes"] == math.floor(memory)
        assert found["device_origin"] == load_device(device).origin
        assert case["row_bytes"] == (704 * 2 if cache == "bf16" else 788)
        expected = hand_percent(base, memory, number)
        assert case["dop_over_dp_percent"] == pytest.approx(expected, abs=0.5)
        rooms = by_layout(case)
        ratio = rooms["dop"]["total_tokens"] / rooms["dp"]["total_tokens"]
        assert case["dop_over_dp_percent"] == pytest.approx(100 * (ratio - 1))
        assert case["dop_over_tp"] == pytest.approx(8, rel=1e-3)
    assert found["num_parameters"] == pytest.approx({"v32": 671.9e9, "glm5": 743.9e9}[name], rel=1e-3)


@pytest.mark.parametrize(
    ("number", "text"),
    [(671_026_419_200, "671.0 B"), (10**9, "1.0 B"), (10_449_024, "10.4 M"), (31_200, "31.2 K"), (999, "999")],
)
def test_numbers_of_parameters(number: int, text: str) -> None:
    assert format_count(number) == text


def test_both_is_the_two_alone(written: dict[str, str]) -> None:
    fixed = ("--model", written["small"], "--memory", "130G", "--ranks", "8", "--weights", "fp8", "--lengths", "100,28")
    both = report(*fixed, "--attention", "both")["cases"]
    assert both == [report(*fixed, "--attention", one)["cases"][0] for one in ("fp8", "bf16")]
    assert [case["formats"]["attention"] for case in both] == ["fp8", "bfloat16"]


def test_the_table_says_what_the_json_says(written: dict[str, str]) -> None:
    arguments = (
        "--model",
        written["small"],
        "--device",
        "h200",
        "--ranks",
        "8",
        "--weights",
        "fp8",
        "--attention",
        "both",
    )
    arguments += ("--memory-share", "0.85", "--lengths", "4096,1024", "--lengths", "100000,50")
    found, table = report(*arguments), run(*arguments)
    assert table.exit_code == 0
    assert all(text in table.stdout for text in found["assumptions"].values())
    assert "85 % of the" in table.stdout and "deepseek_v32, 6 layers" in table.stdout
    for case in found["cases"]:
        assert f"Attention in {case['formats']['attention']}, other weights in fp8, cache in bfloat16" in table.stdout
        assert f"DOP holds {case['dop_over_dp_percent']:.1f} % more than DP" in table.stdout
        for number in case["weights_bytes"][0].values():
            assert f" {number:,} " in table.stdout
        for index in range(2):
            for kind in ("full_length", "mean_length"):
                figures = [f"{room['batches'][index][kind]:,}" for room in case["layouts"]]
                assert any(line.split()[-4:] == figures for line in table.stdout.splitlines())
        for room in case["layouts"]:
            figures = [room["layout"], f"{room['total_tokens']:,}"]
            assert any(line.split()[:2] == figures for line in table.stdout.splitlines())


@RUNS
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 70))
def test_the_mean_of_pages(prompt: int, output: int, page_tokens: int) -> None:
    lengths = Lengths(prompt=prompt, output=output)
    counts = [math.ceil(tokens / page_tokens) for tokens in range(prompt + 1, prompt + output + 1)]
    assert lengths.mean_pages(page_tokens) == Fraction(sum(counts), output)
    assert lengths.pages(page_tokens) == counts[-1]


@RUNS
@given(st.sampled_from(list(PlacementKind)), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 60))
def test_the_largest_batch_against_placing_page_by_page(kind: PlacementKind, held: list[int], pages: int) -> None:
    room = Capacity(pages_per_rank=tuple(held), page_tokens=4, placement=kind)
    found, ranks = largest_batch(room, pages), len(held)
    left, count, home = list(held), 0, 0
    while True:
        if kind is PlacementKind.REPLICATED:
            left = [free - pages for free in left]
        elif kind is PlacementKind.OWNED:
            left[left.index(max(left))] -= pages
        else:
            for page in range(pages):
                left[(home + page) % ranks] -= 1
            home = (home + pages) % ranks
        if min(left) < 0:
            break
        count += 1
    if kind is PlacementKind.STRIPED and len(set(held)) > 1:
        assert found <= count  # reckoned with the smallest rank
    else:
        assert found == count


def test_requests_that_no_rank_can_hold_do_not_fit(written: dict[str, str]) -> None:
    arguments = ("--model", written["glm"], "--memory", "19G", "--ranks", "4", "--lengths", "150000,50000")
    rooms = by_layout(report(*arguments)["cases"][0])
    (dp,), (cp,) = rooms["dp"]["batches"], rooms["cp"]["batches"]
    assert rooms["dp"]["request_tokens"] < 200_000 and dp["full_length"] == 0
    assert rooms["cp"]["request_tokens"] >= 200_000 and cp["full_length"] >= 1


def test_a_layout_without_room_is_said_with_what_it_lacks(written: dict[str, str]) -> None:
    model, config = parse(V32), EngineConfig(num_ranks=8, dtype="bfloat16", formats=Formats(weights="fp8"))
    m = memory_map(model, config, 0)
    memory = m.workspace_bytes + m.own_bytes + m.others_bytes // 2
    arguments = ("--model", written["v32"], "--memory", str(memory), "--ranks", "8", "--weights", "fp8")
    (case,) = report(*arguments, "--lengths", "64,64")["cases"]
    rooms = by_layout(case)
    assert rooms["dop"]["total_tokens"] > 0 and rooms["dop"]["no_room"] is None
    for layout in ("dp", "cp"):
        assert rooms[layout]["total_tokens"] == 0 and rooms[layout]["batches"][0]["full_length"] == 0
        assert f"too small for layout {layout} on rank 0" in rooms[layout]["no_room"]
    assert case["dop_over_dp_percent"] is None and case["dop_over_tp"] == pytest.approx(8)
    table = run(*arguments).stdout
    assert f"dp: no room: {memory} is too small" in table and "more than DP" not in table


@pytest.mark.parametrize("given", [("--device", "h200"), ("--memory", "100G"), ("--memory", "100G", "--json")])
def test_no_room_in_any_layout_is_an_error_beside_the_figures(written: dict[str, str], given: tuple[str, ...]) -> None:
    result = run("--model", written["glm5"], "--ranks", "4", *given)
    assert result.exit_code != 0 and result.stdout.count("too small for layout") == 4
    assert "memory_bytes: " not in result.output
    assert f"Error: {given[0]}: " in result.stderr and "take more ranks, more memory a rank, or" in result.stderr


def test_a_quantised_checkpoint_is_read_and_said(written: dict[str, str], tmp_path: Path) -> None:
    quantised = {**SMALL, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    plain = report("--model", written["small"], "--memory", "900G", "--ranks", "8")
    found = report("--model", str(tmp_path), "--memory", "900G", "--ranks", "8")
    assert found["cases"] == plain["cases"]
    assert "quantised, which is not followed" in found["assumptions"]["model"]
    assert "quantised" not in plain["assumptions"]["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--device: give either --device NAME_OR_JSON or --memory BYTES"),
        (("--device", "h200", "--memory", "1G"), "--memory: is the arena itself"),
        (("--memory", "1G", "--memory-share", "0.5"), "--memory: is the arena itself"),
        (("--device", "abacus"), "h200"),
        (("--device", "cpu"), "--device: cpu does not say how much memory it has"),
        (("--memory", "1Q"), "no size"),
        (("--device", "h200", "--memory-share", "0"), "--memory-share"),
        (("--device", "h200", "--memory-share", "nan"), "'nan' is not a number greater than 0 to 1"),
        (("--device", "h200", "--lengths", "5"), "'5' is not two whole numbers"),
        (("--device", "h200", "--lengths", "5,0"), "one token at least"),
        (("--device", "h200", "--lengths", "202000,1000"), "--lengths: 202000 + 1000 tokens are more than"),
        (("--device", "h200", "--weights", "int4"), "--weights"),
        (("--device", "h200", "--weights", "both"), "--weights"),
        (("--device", "h200", "--experts-cut", "rows"), "--experts-cut"),
        (("--device", "h200", "--page-tokens", "0"), "--page-tokens: 0 is not a whole number"),
    ],
)
def test_what_is_wrong_is_said_by_option(written: dict[str, str], arguments: tuple[str, ...], message: str) -> None:
    result = run("--model", written["glm"], "--ranks", "2", *arguments)
    assert result.exit_code != 0 and message in result.output
    assert "Traceback" not in result.output


def test_slices_of_experts_that_would_be_empty() -> None:
    small = str(Path(__file__).parents[2] / "models" / "splash-tiny")
    result = run("--model", small, "--ranks", "41", "--memory", "1G", "--experts-cut", "inside")
    assert result.exit_code != 0 and "--experts-cut: inside would leave some of 41 ranks nothing" in result.output


@pytest.mark.parametrize("name", ["capacity", "simulate"])
def test_experts_are_cut_by_the_server_s_option(name: str) -> None:
    of = {command: {p.name: p for p in COMMANDS[command].load().params} for command in (name, "serve")}
    mine, server = (of[command]["experts_cut"].to_info_dict() for command in (name, "serve"))
    assert mine == server


@pytest.mark.parametrize("name", ["capacity", "simulate"])
def test_the_share_that_a_server_takes_is_said(name: str) -> None:
    (option,) = (parameter for parameter in COMMANDS[name].load().params if parameter.name == "memory_share")
    assert isinstance(option, click.Option) and f"`serve` on GPUs takes {MEMORY_SHARE}," in str(option.help)


def test_it_is_one_of_the_commands() -> None:
    assert commands.get_command(click.Context(commands), "capacity") is capacity_command


@pytest.mark.parametrize("command", ["capacity", "simulate"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "none is neither a file nor a folder; "),
        ("empty", "empty holds no config.json; "),
        ("text.md", "text.md: is not JSON: "),
        ("tokenizer.json", "tokenizer.json: has no model_type, "),
        ("x" * 5000, "x is neither a file nor a folder; "),
    ],
)
def test_what_is_no_configuration_is_told_where_to_find_one(
    tmp_path: Path, command: str, name: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.md").write_text("# A model")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    more = {"capacity": ["--memory", "1G"], "simulate": ["--device", "h100", "--trace", "prompts:requests=2"]}
    arguments = [command, "--model", str(tmp_path / name), "--ranks", "2", *more[command]]
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code != 0 and "--model: " in result.output and said in result.output
    assert "give a model's config.json, or a folder that holds one" in result.output
