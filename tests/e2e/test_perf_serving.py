"""The serving benchmark's clients against the real server: whole streams, and clients that leave theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.serving import load
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
