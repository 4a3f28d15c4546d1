"""Reading recorded loads, and generating loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.simulate import generators
from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.source import TraceSource
from splash_trt.simulate.traces import NOT_AFTER, Trace, joined, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49,5,1
"""
MOONCAKE = """{"timestamp": 1500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 4500.5, "input_length": 7322, "output_length": 490}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "a.csv", AZURE))
    assert trace.prompt_tokens.tolist() == [374, 5, 396]  # in order of time
    assert trace.output_tokens.tolist() == [44, 1, 109]
    assert trace.arrival_s == pytest.approx([0, 2.31941, 4.314579], abs=1e-6)
    assert read_trace(tmp_path / "a.csv", requests=2).num_requests == 2


@pytest.mark.parametrize(("name", "text", "count"), [("a.csv", AZURE, 3), ("m.jsonl", MOONCAKE, 2)])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, text: str, count: int) -> None:
    assert read_trace(written(tmp_path, name, "\ufeff" + text)).num_requests == count


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "m.jsonl", MOONCAKE))
    assert trace.arrival_s == pytest.approx([0.0, 3.0005])
    assert trace.prompt_tokens.tolist() == [6758, 7322] and trace.output_tokens.tolist() == [500, 490]
    assert any("no prefixes" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "line 1"),
        ("a.csv", "time,in,out\n", "line 1: the columns are 'time,in,out'"),
        ("a.csv", "\0" * 4000, "\\x00'; they must be TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a.csv", AZURE.splitlines()[0] + "\n", "there is no request"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,4\n", "line 5: 2 columns"),
        ("a.csv", AZURE + "yesterday,4,4\n", "line 5: TIMESTAMP: 'yesterday'"),
        ("a.csv", AZURE + "2023-13-16 18:15:50,4,4\n", "line 5: TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,0,4\n", "line 5: ContextTokens: 0"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,4,-1\n", "line 5: GeneratedTokens: '-1'"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,4,1.5\n", "line 5: GeneratedTokens: '1.5'"),
        ("a.csv", AZURE + f"2023-11-16 18:15:50,{'4' * 140000},4\n", "line 5: field larger than"),
        ("a.csv", "x" * 140000, "line 1: field larger than"),
        ("m.jsonl", MOONCAKE + f'{{"timestamp": {"1" * 5000}}}', "line 3: not a JSON object"),
        ("m.jsonl", "\n", "there is no request"),
        ("m.jsonl", MOONCAKE + "{", "line 3: not a JSON object"),
        ("m.jsonl", MOONCAKE + "[1]", "line 3: not a JSON object"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 1, "input_length": 2}', "line 3: there is no output_length"),
        ("m.jsonl", '{"timestamp": -1, "input_length": 2, "output_length": 2}', "line 1: timestamp: -1"),
        ("m.jsonl", '{"timestamp": NaN, "input_length": 2, "output_length": 2}', "line 1: timestamp: nan"),
        ("m.jsonl", '{"timestamp": 1, "input_length": true, "output_length": 2}', "line 1: input_length: True"),
        ("m.jsonl", '{"timestamp": 1, "input_length": 2, "output_length": 0}', "line 1: output_length: 0"),
    ],
)
def test_wrong_files_are_named_by_file_line_and_field(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError) as error:
        read_trace(path)
    assert str(path) in str(error.value) and said in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"TIMESTAMP,\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8.*if it is compressed, unpack it"):
        read_trace(tmp_path / "a.csv")


@pytest.mark.filterwarnings("error")
def test_lengths_that_no_float_holds_are_the_longest_ones() -> None:
    trace = generators.make("rollouts:prompts=1,samples=9,output_sigma=1e6", 0)
    assert isinstance(trace, Trace) and trace.output_tokens.max() == 32768


def test_clipping_counts_and_leaves_the_output() -> None:
    trace = Trace.open("t", np.zeros(3), np.array([10, 90, 5]), np.array([10, 20, 200]))
    clipped, shortened = trace.clipped(100)
    assert shortened == 2
    assert clipped.prompt_tokens.tolist() == [10, 80, 1] and clipped.output_tokens.tolist() == [10, 20, 99]


def test_rate_scales_arrivals_and_not_pauses() -> None:
    trace = Trace.open("t", np.array([4.0, 6.0]), np.ones(2), np.ones(2), after=np.array([NOT_AFTER, 0]))
    assert trace.at_rate(2).arrival_s.tolist() == [2.0, 6.0]


def test_a_closed_loop_and_waves_in_order() -> None:
    chain = Trace.open("c", np.array([1.0, 3.0]), np.ones(2), np.ones(2), after=np.array([NOT_AFTER, 0]))
    later = Trace.open("l", np.array([0.5]), np.ones(1), np.ones(1))
    source = TraceSource(joined("both", [chain, later], in_turn=True))
    assert source.due(0.9) == [] and source.next_s() == 1.0
    assert source.due(1.0) == [(1.0, 0)]
    assert source.next_s() is None  # the second follows the first, the third is of the next wave
    source.ended([0], 10.0)
    assert source.next_s() == 13.0 and source.due(13.0) == [(13.0, 1)]
    source.ended([1], 20.0)
    assert source.due(20.5) == [(20.5, 2)]
    source.ended([2], 21.0)
    assert source.next_s() is None


def test_rollouts_have_a_long_tail_and_groups_of_equal_prompts() -> None:
    trace = generators.make("rollouts:prompts=500,samples=8,output_median=1000,output_sigma=0.9,waves=2", 3)
    assert isinstance(trace, Trace) and trace.num_requests == 8000
    logarithm = np.log(trace.output_tokens)
    assert np.exp(np.median(logarithm)) == pytest.approx(1000, rel=0.05)
    assert logarithm.std() == pytest.approx(0.9, rel=0.05)
    assert np.percentile(trace.output_tokens, 99) > 6 * np.median(trace.output_tokens)
    assert (trace.prompt_tokens.reshape(-1, 8) == trace.prompt_tokens[::8, None]).all()
    assert (trace.arrival_s == 0).all() and (np.bincount(trace.wave) == 4000).all()


def test_agents_contexts_hold_all_that_was_said() -> None:
    trace = generators.make("agents:sessions=5,turns=4,system_tokens=100,pause_s=2", 1)
    assert isinstance(trace, Trace) and trace.num_requests == 20
    for number in range(20):
        before = trace.after[number]
        assert (before == NOT_AFTER) == (number < 5)
        if before >= 0:
            said = trace.prompt_tokens[before] + trace.output_tokens[before]
            assert trace.prompt_tokens[number] > said
    assert (trace.prompt_tokens > 100).all()
    assert any("seen before" in note for note in trace.notes)


def test_reasoning_open_and_closed() -> None:
    opened = generators.make("reasoning:requests=4000,rate=8", 5)
    assert isinstance(opened, Trace)
    assert np.diff(opened.arrival_s).mean() == pytest.approx(1 / 8, rel=0.05)
    assert np.median(opened.output_tokens) > 10 * np.median(opened.prompt_tokens)
    closed = generators.make("reasoning:requests=10,clients=4", 5)
    assert isinstance(closed, Trace)
    assert closed.after.tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", generators.names())
def test_the_seed_decides(name: str) -> None:
    def made(seed: int) -> bytes:
        load = generators.make(name, seed)
        return load.prompt_tokens.tobytes() + load.output_tokens.tobytes()

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_random_traces_are_of_all_kinds() -> None:
    notes = [generators.make("random:size=0.1,room_tokens=100000", seed).notes[1] for seed in range(40)]  # type: ignore[union-attr]
    for kind in ("few", "crowd", "prompts", "full", "mixed"):
        assert sum(kind in note for note in notes) >= 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rollouts:speed=3", "rollouts has no 'speed'; it has prompts, samples"),
        ("rollouts:prompts=many", "prompts: 'many' is not a whole number"),
        ("rollouts:prompts=0", "prompts: 0 is not a whole number from 1"),
        ("reasoning:rate=nan", "rate: nan is not a number from 1e-09"),
        ("reasoning:rate=-1", "rate: -1 is not a number"),
        ("rollouts:prompts", "prompts: '' is not a whole number"),
        ("rollouts:prompts=10000000,samples=100", "about 1e+09 requests are above 10000000; lower prompts or samples"),
        ("agents:sessions=10000000,turns=2", "lower sessions or turns"),
        ("random:size=1e7", "lower phases or size"),
        ("adversary:few=0", "few: 0 is not a whole number from 1"),
    ],
)
def test_wrong_numbers_are_named(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        generators.make(text, 0)
    assert said in str(error.value)


def test_what_an_adversary_sent_can_be_sent_again() -> None:
    foe = Adversary(0, requests=12, few=2, many=4, prompt_tokens=50, long_output=500, short_output=5)
    assert [n for _, n in foe.due(0.0)] == [0, 1, 2, 3]
    foe.watch(Layout.TP, 1.0)
    foe.watch(Layout.DP, 2.0)  # flips: two with long answers at once
    assert [n for _, n in foe.due(2.0)] == [4, 5]
    foe.ended([0, 4], 3.0)
    assert [n for _, n in foe.due(3.0)] == [6]  # for the long one that ended; the short one is not replaced
    trace = foe.trace
    assert trace.num_requests == 7 and foe.flips == 1
    assert trace.after.tolist() == [-1, -1, -1, -1, -1, -1, 4]
    assert (trace.output_tokens[:4] < 50).all() and (trace.output_tokens[4:] > 300).all()


def test_an_adversary_turns_without_a_switch_after_a_while() -> None:
    foe = Adversary(0, requests=100, few=1, many=4, prompt_tokens=50, long_output=500, short_output=5, patience=2)
    kinds: list[bool] = []  # of each request: is its answer long?
    while (due := foe.due(0.0)) and len(kinds) < 40:
        for _, number in due:
            kinds.append(bool(foe.output_tokens[number] > 300))
            foe.watch(Layout.TP, 0.0)
            foe.ended([number], 0.0)
    assert kinds[:8] == [False] * 8 and kinds[8:10] == [True] * 2 and not kinds[10]
    assert foe.flips == 0
