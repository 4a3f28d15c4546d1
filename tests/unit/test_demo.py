"""The demo's own logic: its load, what it makes of samples and records, its table and picture, its child processes."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from scripts.demo import __main__ as demo
from scripts.demo import check, load, plot, processes, screen, timeline
from scripts.demo.client import Answer, _event, _take
from splash_trt.config import Layout
from splash_trt.request import Request, SamplingParams


def sample(at: float, layout: str, running: int = 1, switch: str = "steady", **computed: float) -> timeline.Sample:
    return timeline.Sample(
        at=at, layout=layout, switch=switch, running=running, used_tokens=(running * 16, 0), computed=computed
    )


SAMPLES = [
    sample(0.0, "tp", 0),
    sample(1.0, "tp", 48, tp=100),
    sample(2.0, "tp", 48, "migrating", tp=300),
    sample(3.0, "dp", 40, dp=200, tp=300),
    sample(5.0, "dp", 3, dp=700, tp=300),
    sample(6.0, "tp", 3, dp=700, tp=310),
    sample(8.0, "tp", 0, dp=700, tp=330),
]


def record(number: int, source: str, target: str, **changes: Any) -> dict[str, Any]:
    about = {"number": number, "source": source, "target": target, "outcome": "committed", "stall_s": 0.001 * number}
    return {**about, "bytes_between_ranks": {"weights": 1000, "pages": 200, "new_rows": 3}, **changes}


RECORDS = [
    record(3, "dp", "tp", stall_s=None),
    record(2, "dp", "cp", outcome="aborted: replaced"),
    record(1, "tp", "dp"),
]


class TestLoad:
    def test_burst(self) -> None:
        asks = load.burst()
        assert len({ask.name for ask in asks}) == len({ask.seed for ask in asks}) == len(asks) >= 48
        longest = max(ask.max_tokens for ask in asks[: -load.NUM_LONG])
        assert all(ask.max_tokens > 2 * longest for ask in asks[-load.NUM_LONG :])
        assert {ask.temperature for ask in asks} == {0.0, load.SAMPLED}
        assert {ask.path for ask in asks} == {"/v1/completions", "/v1/chat/completions"}

    def test_bodies(self) -> None:
        text, chat = load.burst()[0], next(ask for ask in load.burst() if ask.speaker)
        assert text.body()["prompt"] == text.prompt and "messages" not in text.body()
        assert chat.body()["messages"] == [{"role": "user", "content": chat.speaker}] and "prompt" not in chat.body()

    def test_long_prompt(self) -> None:
        assert load.long_prompt([[1, 2], [], [3]]).prompt == ((1, 2, 3) * 1000)[: load.LONG_PROMPT_TOKENS]
        much = [list(range(2000)), list(range(2000))]
        prompt = load.long_prompt(much).prompt
        assert len(prompt) == load.LONG_PROMPT_TOKENS and prompt[2000] == 0
        with pytest.raises(ValueError, match="answers"):
            load.long_prompt([[]])


class TestTimeline:
    def test_bands(self) -> None:
        found = [(band.layout, band.begin, band.end) for band in timeline.bands(SAMPLES)]
        assert found == [("tp", 0.0, 3.0), ("dp", 3.0, 6.0), ("tp", 6.0, 8.0)]

    def test_rows(self) -> None:
        tp, dp = timeline.rows(SAMPLES, RECORDS)
        assert (tp.layout, tp.share, tp.tokens_per_s, tp.switches_to) == ("tp", 5 / 8, 330 / 5, 1)
        assert (dp.layout, dp.share, dp.tokens_per_s, dp.switches_to) == ("dp", 3 / 8, 700 / 3, 1)
        assert (dp.bytes_moved, dp.longest_stall_s, tp.longest_stall_s) == (1203, 0.001, None)

    def test_a_layout_too_short_to_be_seen_has_its_switch_counted(self) -> None:
        records = [*RECORDS, record(4, "tp", "dop")]
        row = timeline.rows(SAMPLES, records)[-1]
        assert (row.layout, row.share, row.switches_to) == ("dop", 0.0, 1)

    def test_rates(self) -> None:
        rates = timeline.rates(SAMPLES, window_s=1.0)
        assert rates[0] == 0.0 and rates[1] == 100.0
        assert rates[4] == 250.0  # 500 tokens since the sample before

    def test_replay(self) -> None:
        assert timeline.replay(SAMPLES) == [(300, "dp"), (1000, "tp")]

    def test_unvisited(self) -> None:
        assert timeline.unvisited(["tp", "dp"]) == ["cp", "dop"]
        assert timeline.unvisited(timeline.LAYOUTS) == []

    def test_layouts_are_those_of_the_server(self) -> None:
        assert set(timeline.LAYOUTS) == {layout.name.lower() for layout in Layout} == set(plot.COLORS)


class TestScreen:
    def test_table(self) -> None:
        lines = screen.table(timeline.rows(SAMPLES, RECORDS)).splitlines()
        assert len({len(line) for line in lines}) == 1
        cells = [line.split("  ") for line in lines]
        assert [cell.strip() for cell in cells[2] if cell.strip()] == ["TP", "62%", "66", "1", "1.2 kB", "-"]
        assert [cell.strip() for cell in cells[3] if cell.strip()] == ["DP", "38%", "233", "1", "1.2 kB", "1.0 ms"]
        assert [cell.strip() for cell in cells[5] if cell.strip()] == ["all", "100%", "129", "2", "2.4 kB", "1.0 ms"]

    @pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (13e6, "13.0 MB"), (2e12, "2000.0 GB")])
    def test_size(self, count: float, text: str) -> None:
        assert screen.size(count) == text

    @pytest.mark.parametrize(("share", "full"), [(-1.0, 0), (0.0, 0), (0.5, 5), (1.0, 10), (7.0, 10)])
    def test_bar(self, share: float, full: int) -> None:
        assert screen.bar(share, 10) == "█" * full + "░" * (10 - full)

    def test_no_control_characters_where_there_is_no_terminal(self) -> None:
        out = io.StringIO()
        with screen.part(out, "1 build") as part:
            part.update(0.5, "half")
            part.say("a line")
        lines = out.getvalue().splitlines()
        assert lines[0] == "a line" and lines[1].startswith("1 build  ████") and "100%" in lines[1]
        assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()

    def test_terminal(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        out = Terminal()
        with screen.part(out, "1 build") as part:
            part.update(0.5, "x" * 500)
        drawn = out.getvalue().split("\r\x1b[K")
        assert all(len(line) <= screen.LINE_WIDTH for line in drawn) and " 50%" in drawn[2]


class TestPlot:
    def test_picture(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "timeline.png"
        note = plot.footnote(RECORDS, "This machine.")
        events = [(0.1, "requests"), (4.0, "a prompt")]
        plot.draw(path, SAMPLES, asked=[(5.5, "tp")], events=events, title="a title", footnote=note)
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 600 and picture.shape[1] > 1000
        for layout in ("tp", "dp"):
            color = [int(plot.COLORS[layout][i : i + 2], 16) / 255 for i in (1, 3, 5)]
            assert (np.abs(picture[..., :3] - color).max(-1) < 0.01).sum() > 10_000, layout

    def test_where_a_switch_was_under_way(self) -> None:
        assert plot._moving(SAMPLES) == [(2.0, 3.0)]


class TestAnswers:
    def test_events_of_both_apis(self) -> None:
        text, chat = (Answer(ask, 0.0) for ask in load.burst()[:2])
        _take(text, {"choices": [{"text": "a b", "token_ids": [1, 2], "finish_reason": None}]})
        assert not text.done
        _take(text, {"choices": [{"text": " c", "token_ids": [3], "finish_reason": "length"}]})
        assert (text.text, text.tokens, text.done) == ("a b c", [1, 2, 3], True)
        _take(chat, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        _take(chat, {"choices": [{"delta": {"content": "x"}, "token_ids": [7], "finish_reason": "stop"}]})
        assert (chat.text, chat.tokens, chat.done) == ("x", [7], True)

    def test_lines_of_a_stream(self) -> None:
        answer = Answer(load.burst()[0], 0.0)
        for line in ("", ": nothing new", ":", "data: [DONE]"):
            assert _event(answer, line) is None
        assert _event(answer, 'data: {"choices": []}') == {"choices": []}
        for line in ("data: nothing new", "<html>", "data: 7", 'data: {"id": 1}', "data:"):
            with pytest.raises(processes.Failure, match=answer.ask.name):
                _event(answer, line)

    def test_an_error_in_a_stream(self) -> None:
        with pytest.raises(processes.Failure, match="short 1: the engine ended"):
            _take(Answer(load.burst()[0], 0.0), {"error": {"message": "the engine ended"}})


class TestCheck:
    def test_difference(self) -> None:
        assert check.difference([1, 2, 3], [1, 2, 3]) is None
        assert check.difference([1, 5, 3], [1, 2, 3]) == 1
        assert check.difference([1, 2], [1, 2, 3]) == 2 == check.difference([1, 2, 3], [1, 2])

    def test_switching_and_not(self) -> None:
        """Both runs, with little to do: the switches come, in order, and change nothing."""
        model = str(Path(__file__).resolve().parents[2] / "models" / "splash-tiny")
        sampling = SamplingParams(max_tokens=24, temperature=0.7, seed=1)
        first = [Request(id=f"r{i}", prompt=(323, 351, 715, 290 + i), sampling=sampling) for i in range(2)]
        then = [Request(id="last", prompt=tuple(range(2, 40)), sampling=sampling)]
        counts: list[int] = []
        never = check.run(check.Job(model=model, ranks=1, first=first, then=then, switches=[]), counts.append)
        switches = [(70, "dp"), (80, "cp"), (100, "dop")]
        switching = check.run(check.Job(model=model, ranks=2, first=first, then=then, switches=switches), counts.append)
        assert never.layouts == ["tp"] and switching.layouts == ["tp", "dp", "cp", "dop"]
        assert switching.tokens == never.tokens and len(never.tokens["last"]) == 24
        assert max(counts) == sum(len(tokens) for tokens in never.tokens.values())


class TestVerdict:
    ALL = ["tp", "dp", "cp", "dop"]

    def judge(self, tokens: list[int], layouts: list[str], records: list[dict[str, Any]]) -> bool:
        answers = [Answer(ask, 0.0, tokens=[1, 2, 3]) for ask in load.burst()[:2]]
        never = {answer.ask.name: [1, 2, 3] for answer in answers}
        samples = [sample(float(i), layout) for i, layout in enumerate(self.ALL)]
        served = demo.Served(answers=answers, samples=samples, records=records, asked=[])
        switching = check.Result(tokens={**never, "short 2": tokens}, layouts=layouts)
        return demo._judge(served, check.Result(tokens=never, layouts=["tp"]), switching)

    def test_all_equal(self, capsys: pytest.CaptureFixture[str]) -> None:
        records = [record(i, "tp", "dp") for i in range(1, 4)]
        assert not self.judge([1, 2, 3], self.ALL, records)
        assert "all 2 are equal, token for token (6 tokens)" in capsys.readouterr().out

    def test_a_different_answer_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.judge([1, 2, 4], self.ALL, [record(i, "tp", "dp") for i in range(1, 4)])
        out = capsys.readouterr().out
        assert "'short 2' from its token 2 on" in out and "are equal" not in out

    def test_too_little_happened(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.judge([1, 2, 3], ["tp", "dp", "cp", "tp"], [record(1, "tp", "dp")])
        out = capsys.readouterr().out
        assert "the server" in out and "the check: it saw only" in out


class TestProcesses:
    def test_ended_when_left(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
        with pytest.raises(KeyboardInterrupt), processes.running(command, tmp_path / "log") as process:
            raise KeyboardInterrupt
        assert process.poll() is not None

    def test_ended_by_force(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "END_S", 0.2)
        code = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(60)"
        log = tmp_path / "log"
        with processes.running([sys.executable, "-c", code], log) as process:
            while not log.read_bytes():
                time.sleep(0.01)
        assert process.returncode == -9

    def test_tail(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert processes.tail(log) == "    (empty)"
        log.write_text("".join(f"line {i}\n" for i in range(100)))
        lines = processes.tail(log).splitlines()
        assert len(lines) == processes.TAIL_LINES and lines[-1] == "    line 99"

    def test_free_port(self) -> None:
        assert 1024 < processes.free_port() < 65536


def test_requests_are_those_that_the_server_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat goes through the model's template, a text through its tokenizer, ids stay as they are."""
    (tmp_path / "tokenizer").symlink_to(Path(__file__).parents[2] / "models" / "splash-tiny")
    monkeypatch.setattr(demo, "ENGINE", tmp_path)
    asks = [
        load.Ask(name=name, max_tokens=5, temperature=0.0, seed=1, **what)  # type: ignore[arg-type]
        for name, what in (("chat", {"speaker": "Hamlet"}), ("text", {"prompt": "Hamlet"}), ("ids", {"prompt": (3, 4)}))
    ]
    chat, text, ids = demo._requests([Answer(ask=ask, began=0.0) for ask in asks])
    assert ids.prompt == (3, 4)
    assert 0 < len(text.prompt) < len(chat.prompt)


def test_the_server_samples_as_the_check_does() -> None:
    """What a request leaves open, the model's generation_config.json decides, which the check does not read."""
    defaults = json.loads((Path(demo.__file__).parents[2] / "models/splash-tiny/generation_config.json").read_text())
    decided = {name for name in defaults if name in SamplingParams.__struct_fields__}
    assert decided and all(decided <= ask.body().keys() for ask in load.burst())
    assert all(ask.body()["top_p"] == SamplingParams().top_p for ask in load.burst())
