"""The serving benchmark's clients against the real server: whole streams, and clients that leave theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.serving import load
from perf.serving import server as perf_server
from perf.serving.client import Wish
from tests.e2e.servers import MODEL, Server, wait_until

pytestmark = pytest.mark.mpi


def test_streams_are_whole_and_those_that_are_left_give_their_cache_back(server: Server) -> None:
    vocab_size = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
    wishes = [Wish(20, 12, 12)] * 4 + [Wish(30, 6, 400)] * 2
    answers = load.run(server.url, "splash-tiny", vocab_size, wishes, clients=6, processes=2, seed=3)
    assert not [answer.failure for answer in answers if answer.failure]
    assert sorted(answer.tokens for answer in answers) == [6, 6, 12, 12, 12, 12]
    figures = load.figures(answers)
    assert figures["failed"] == 0 and float(figures["tokens_per_s"] or 0) > 0

    def free() -> bool:
        status = server.ask("GET", "/v1/layout").json["status"]
        return set(status["used_tokens"]) == {0} and status["running"] == 0

    wait_until(free, 30, "the cache of streams that were left")


def test_a_server_that_runs_already_tells_its_room_and_what_it_told_since(server: Server) -> None:
    vocab_size = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
    held = perf_server.Server(server.port)
    before = held.settled_output_tokens()
    load.run(server.url, "splash-tiny", vocab_size, [Wish(8, 5, 5)] * 4, clients=2, processes=1, seed=4)
    held.wait_until_idle()
    assert held.output_tokens(at_least=before + 20) == before + 20
    assert (held.cache_tokens("tp") or 0) > 0 and held.cache_tokens("auto") is None
