"""The serving benchmark's own parts: what its clients send and count, its floors, and the ceiling of a rollout."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from perf import harness
from perf.floor import Floor
from perf.serving import deployment, hold, load, measure, rollout
from perf.serving.add_ceiling import with_ceiling
from perf.serving.ceiling import StepTimes, rollout_s
from perf.serving.client import Answer, Wish, tokens_of
from perf.serving.load import Case
from splash_trt.config import EngineConfig, Layout
from splash_trt.models.families import load_config
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.devices import load_device

TINY = Path(__file__).resolve().parents[2] / "perf" / "configs" / "tiny"


class FakeServer:
    """Streams as many tokens as are asked for, three in an event; a prompt of 13 is refused, one of 14 cut short."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = self.left = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(application)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(body["prompt"]) == 13:
            return web.Response(status=429, text="no room")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse()
        await response.prepare(request)
        rest = body["max_tokens"] - (2 if len(body["prompt"]) == 14 else 0)
        try:
            while rest:
                count, rest = min(3, rest), rest - min(3, rest)
                event = {"choices": [{"text": "", "token_ids": [7] * count}]}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await asyncio.sleep(0.002)
            await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
        except ConnectionError:
            self.left += 1
        self.open -= 1
        return response

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


class TestClients:
    def test_every_request_is_sent_once_and_its_tokens_are_counted(self, server: FakeServer) -> None:
        wishes = [Wish(5, 4, 4)] * 7 + [Wish(6, 1, 1)] * 2
        answers = load.run(server.url, "m", 2048, wishes, clients=4, processes=2, seed=1)
        assert sorted(a.tokens for a in answers) == [1, 1] + [4] * 7
        assert all(not a.failure and a.begin < a.first <= a.end for a in answers)
        assert 2 <= server.most_open <= 4
        assert sorted(len(body["prompt"]) for body in server.bodies) == [5] * 7 + [6] * 2
        assert len({tuple(body["prompt"]) for body in server.bodies}) == 9, "prompts are random"
        assert all(1000 <= token < 2048 for body in server.bodies for token in body["prompt"])
        wanted = {"model": "m", "ignore_eos": True, "temperature": 0, "stream": True, "detokenize": False}
        assert all(body.items() >= wanted.items() for body in server.bodies)

    def test_a_client_leaves_when_it_has_enough(self, server: FakeServer) -> None:
        (answer,) = load.run(server.url, "m", 2048, [Wish(5, 8, 3000)], clients=1, processes=1, seed=1)
        assert (answer.tokens, answer.failure) == (8, "")
        assert server.bodies[0]["max_tokens"] == 3000

    def test_refusals_and_short_streams_are_failures(self, server: FakeServer) -> None:
        answers = load.run(server.url, "m", 2048, [Wish(13, 4, 4), Wish(14, 4, 4)], clients=1, processes=1, seed=1)
        assert [a.failure for a in answers] == ["429: no room", "2 tokens in the stream, 4 asked"]
        with pytest.raises(AssertionError, match="2 streams failed"):
            measure.all_told([{"failed": 2, "requests": 2, "output": 4}], 8)

    def test_only_data_holds_tokens(self) -> None:
        assert tokens_of(b'data: {"choices":[{"token_ids":[1,2]},{"token_ids":[3]}]}\n') == 3
        assert tokens_of(b'data: {"choices":[{"text":"x","token_ids":null}],"usage":null}\n') == 0
        assert tokens_of(b"data: [DONE]\n") == tokens_of(b": keep-alive\n") == tokens_of(b"\n") == 0

    def test_cases_by_name(self) -> None:
        assert Case.parse("16x512x128x64") == Case(clients=16, prompt=512, output=128, requests=64)
        for text in ("16x512x128", "0x1x1x1", "ax1x1x1"):
            with pytest.raises(ValueError, match="CLIENTSxPROMPTxOUTPUTxREQUESTS"):
                Case.parse(text)

    def test_figures(self) -> None:
        answers = [Answer(begin=i, first=i + 0.5, end=i + 2.5, tokens=5, failure="") for i in range(10)]
        answers.append(Answer(begin=3, first=3, end=3, tokens=0, failure="429"))
        row = load.figures(answers)
        assert row == {
            "failed": 1,
            "seconds": 11.5,
            "tokens_per_s": round(50 / 11.5, 1),
            "ttft_ms_p50": 500.0,
            "ttft_ms_p99": 500.0,
            "tpot_ms_p50": 500.0,
            "tpot_ms_p99": 500.0,
        }

    def test_what_the_server_counts_must_agree(self) -> None:
        rows: list[Any] = [{"failed": 0, "requests": 3, "output": 4}]
        assert "12 tokens in 3 streams" in measure.all_told(rows, 12)
        with pytest.raises(AssertionError, match="counts 11 output tokens, its clients 12"):
            measure.all_told(rows, 11)


class TestFloor:
    def test_experts_that_a_batch_touches(self) -> None:
        """One token: its own. More: an expert is missed by all of them with the product of their chances."""
        model = load_config(TINY)
        assert model.experts is not None
        count, k = model.experts.num_experts, model.experts.top_k
        floor = Floor(model, EngineConfig(num_ranks=2), load_device("h200"))
        assert floor.experts_hit(1) == pytest.approx(k)
        assert floor.experts_hit(3) == pytest.approx(count * (1 - (1 - k / count) ** 3))

    def test_no_step_is_predicted_below_it(self) -> None:
        model, config = load_config(TINY), EngineConfig(num_ranks=2, dtype="bfloat16")
        floor, costs = Floor(model, config, load_device("h200")), CostModel(model, config, load_device("h200"))
        zeros = np.zeros(2)
        for layout in Layout:
            for batch in (1, 8, 64):
                tokens = np.bincount(np.arange(batch) % 2, minlength=2).astype(float)
                step = Batch(
                    layout=layout,
                    decode_tokens=tokens,
                    decode_context=tokens * 500,
                    prefill_tokens=zeros,
                    prefill_pairs=zeros,
                    prefill_context=zeros,
                    sampled=batch,
                )
                assert 0 < floor.decode_ms(layout, batch, 500) < 1e3 * costs.step_s(step)
            assert floor.prefill_ms(layout, 4096) > floor.prefill_ms(layout, 512) > 0

    def test_auto_has_the_least_of_all_layouts(self) -> None:
        floor = Floor(load_config(TINY), EngineConfig(num_ranks=2, dtype="bfloat16"), load_device("h200"))
        case = Case(clients=4, prompt=100, output=20, requests=4)
        each = [measure.floors(floor, name, case)["floor_tpot_ms"] for name in deployment.LAYOUTS]
        assert measure.floors(floor, "auto", case)["floor_tpot_ms"] == min(map(float, filter(None, each)))
        assert measure.floors(None, "auto", case) == {}


def step_times() -> StepTimes:
    """tp is fast alone, dp in a crowd; contexts only matter beyond 100."""
    cells = {("tp", 1): 2.0, ("tp", 16): 32.0, ("dp", 1): 4.0, ("dp", 16): 8.0}
    decode: list[Any] = [
        {"layout": layout, "batch": batch, "context": context, "median_ms": ms * (2 if context == 1000 else 1)}
        for (layout, batch), ms in cells.items()
        for context in (100, 1000)
    ]
    return StepTimes(decode, [{"tokens_per_s": 1000.0}, {"tokens_per_s": 500.0}])


class TestCeiling:
    def test_cells_and_between_them(self) -> None:
        times = step_times()
        batch, context = np.array([1, 16, 4, 1, 99]), np.array([100, 1000, 100, 1, 5000])
        expected = [2.0, 64.0, 8.0, 2.0, 64.0]
        assert times.decode_ms("tp", batch, context) == pytest.approx(expected)
        assert times.decode_ms("dp", np.array([4]), np.array([100])) == pytest.approx([4 * math.sqrt(2)])

    def test_a_burst_and_its_tail_each_in_its_layout(self) -> None:
        """16 answers, 15 of them of 3 tokens, one of 5; the first token comes with the prompt."""
        times, outputs = step_times(), [3] * 15 + [5]
        prefill = 16 * 10 / 1000
        assert rollout_s(times, 10, outputs, ["tp"]) == pytest.approx(prefill + (2 * 32 + 2 * 2) / 1e3)
        assert rollout_s(times, 10, outputs, ["dp"]) == pytest.approx(prefill + (2 * 8 + 2 * 4) / 1e3)
        assert rollout_s(times, 10, outputs, times.layouts) == pytest.approx(prefill + (2 * 8 + 2 * 2) / 1e3)

    def test_one_batch_and_one_context_are_enough(self) -> None:
        times = StepTimes([{"layout": "tp", "batch": 4, "context": 64, "median_ms": 3.0}], [{"tokens_per_s": 1.0}])
        assert times.decode_ms("tp", np.array([1, 4, 9]), np.array([1, 64, 99])) == pytest.approx([3.0] * 3)


class TestRollout:
    def test_lengths_are_the_same_in_every_run_and_bounded(self) -> None:
        load = {"prompts": 1000, "median": 600, "sigma": 1.0, "most": 4096}
        found = rollout.lengths(**load)
        assert found == rollout.lengths(**load) and len(found) == 1000
        assert min(found) >= 1 and max(found) == 4096
        assert 500 < float(np.median(found)) < 700

    def test_a_warm_up_has_each_layout_once_and_nobody_learns_its_lengths(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []

        class Layouts:
            url = ""

            def go_to(self, layout: str) -> None:
                seen.append(layout)

            def wait_until_idle(self) -> None: ...

        def run(*about: Any, **how: Any) -> None:
            seen.append(about[3])

        monkeypatch.setattr(load, "run", run)
        server: Any = Layouts()
        options = rollout.parse(["--most", "64", "--layouts", "tp", "auto", "dp", "auto"])
        rollout.warm_up(server, options, [1, 64, 65], 2048)
        assert seen[::2] == list(deployment.LAYOUTS)
        assert seen[1::2] == [[Wish(512, 1, 64), Wish(512, 2, 64), Wish(512, 3, 64)]] * 4
        seen.clear()
        rollout.warm_up(server, rollout.parse(["--layouts", "dp", "dp"]), [1], 2048)
        assert seen[::2] == ["dp"]

    def test_ratios_are_of_the_same_round(self) -> None:
        rows: list[Any] = [
            {"round": turn, "layout": layout, "seconds": seconds}
            for turn, scale in ((1, 1.0), (2, 3.0))
            for layout, seconds in (("tp", 4.0 * scale), ("auto", 2.0), ("ceiling", 1.0))
        ]
        assert [row["auto_over"] for row in rollout.with_ratios(rows)] == [0.5, 1.0, 2.0, 0.1667, 1.0, 2.0]

    def test_a_ceiling_that_comes_later_is_what_it_would_have_been(self) -> None:
        options = rollout.parse(["--prompts", "20", "--prompt", "10", "--median", "4", "--most", "9", "--rounds", "2"])
        rows: list[Any] = [
            {"load": "rollout", "round": turn, "layout": layout, "seconds": 4.0}
            for turn in (1, 2)
            for layout in ("tp", "auto", "ceiling")
        ]
        result = harness.Result(
            schema=harness.SCHEMA_VERSION,
            area="serving",
            name="rollout",
            title="A rollout",
            provenance=deployment.provenance(options, "perf.serving.rollout", [], options.layouts),
            check=harness.Check(what="lengths", passed=True, detail="all"),
            view=rollout.VIEW,
            rows=rows,
        )
        found = with_ceiling(result, step_times()).rows
        outputs = rollout.lengths(prompts=20, median=4, sigma=1.0, most=9)
        seconds = rollout_s(step_times(), 10, outputs, ["tp", "dp"])
        assert [row["layout"] for row in found] == ["tp", "auto", "tp", "auto", "ceiling", "ceiling"]
        assert [row["seconds"] for row in found[4:]] == pytest.approx([seconds] * 2, abs=1e-3)
        assert found[4]["auto_over"] == pytest.approx(4 / seconds, abs=0.01 / seconds)

    def test_folders_are_told_by_their_names(self) -> None:
        arguments = ["--model", str(TINY), "--remark", "quiet", "--at", "/a", "--step-times", "/some/where/engines"]
        options = rollout.parse(arguments)
        told = deployment.provenance(options, "perf.serving.rollout", arguments, ["tp", "cp", "auto"])
        assert told.remark == "quiet; not measured: dp, dop"
        assert told.command == "python -m perf.serving.rollout --model tiny --step-times engines"
        assert "at" not in told.config
        assert told.config["model"] == "tiny" and told.config["model_config"]["model_type"]


class TestHeldServer:
    GIVEN = ("--model", str(TINY), "--run-on", "cpu", "--serve", "--memory 64MiB")

    @pytest.fixture
    def port(self) -> Iterator[int]:
        """Where something speaks HTTP."""
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server.server_port
            server.shutdown()
            thread.join()

    def held(self, folder: Path, port: int) -> Path:
        flags = deployment.flags(hold.parse(["file", *self.GIVEN]))
        hold.publish(deployment.Held(port=port, flags=flags), folder / "held")
        return folder / "held"

    def test_it_has_the_flags_that_the_result_tells_of(self, tmp_path: Path, port: int) -> None:
        held = self.held(tmp_path, port)
        for parse in (measure.parse, rollout.parse):
            with deployment.server(parse([*self.GIVEN, "--at", str(held)])) as server:
                assert server.port == port
            with pytest.raises(ValueError, match="--memory 64MiB, not .*--memory 65MiB"):
                deployment.server(parse([*self.GIVEN[:-1], "--memory 65MiB", "--at", str(held)]))

    def test_one_that_is_gone(self, tmp_path: Path) -> None:
        with socket.socket() as taken:  # which nobody listens at
            taken.bind(("127.0.0.1", 0))
            held = self.held(tmp_path, taken.getsockname()[1])
            with pytest.raises(ValueError, match="^at: no server answers at port .* remove .*held, and hold another"):
                deployment.server(measure.parse([*self.GIVEN, "--at", str(held)]))
        for data in ("{}", "hello"):
            held.write_text(data)
            with pytest.raises(ValueError, match="^at: .*held is not of a server"):
                deployment.server(measure.parse([*self.GIVEN, "--at", str(held)]))

    def test_a_file_is_of_one_server(self, tmp_path: Path) -> None:
        """Both would remove it."""
        hold.check(tmp_path / "held")
        held = self.held(tmp_path, 1)
        with pytest.raises(ValueError, match="^file: .*held is there already"):
            hold.check(held)
        with pytest.raises(FileExistsError):
            self.held(tmp_path, 2)
        assert msgspec.json.decode(held.read_bytes(), type=deployment.Held).port == 1
        assert list(tmp_path.iterdir()) == [held]
        with pytest.raises(ValueError, match="^file: there is no folder"):
            hold.check(tmp_path / "none" / "held")

    @pytest.mark.parametrize("ends", ["by itself", "by a signal", "by a signal as it appears"])
    def test_its_file_is_there_while_it_serves(self, ends: str, tmp_path: Path, monkeypatch: Any) -> None:
        file = tmp_path / "held"

        class Fake:
            port = 77

            def __init__(self, flags: list[str]) -> None:
                self.flags = flags

            def __enter__(self) -> Fake:
                return self

            def __exit__(self, *_: object) -> None:
                assert not file.exists(), "told of a server that is being ended"

            def wait_until_ended(self) -> None:
                assert msgspec.json.decode(file.read_bytes()) == {"port": 77, "flags": self.flags}
                if ends == "by a signal":
                    signal.raise_signal(signal.SIGTERM)

        link = os.link

        def seen(part: Path, target: Path) -> None:
            link(part, target)
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(hold, "Started", Fake)
        if ends == "by a signal as it appears":
            monkeypatch.setattr(hold.os, "link", seen)
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            if ends == "by itself":
                assert hold.main([str(file), "--model", str(TINY)]) == 1
            else:
                with pytest.raises(SystemExit, match="143"):
                    hold.main([str(file), "--model", str(TINY)])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert list(tmp_path.iterdir()) == []
