"""The serving command itself on evaluated networks: real ranks, real HTTP, switches in the midst of an answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from splash_engines.build import build_engine
from tests.e2e import servers
from tests.e2e.servers import MODEL, Server, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.mpi, pytest.mark.timeout(1200)]

PROGRAM = Path(__file__).with_name("splash_evaluator.py")
PROMPT = "ROMEO.\nBut soft, what light through yonder window breaks?\n"
FLAGS = ("--dtype", "float64", "--memory", "256M", "--page-tokens", "16", "--max-batch-tokens", "128",
         "--max-running", "16")  # fmt: skip


def answers(engine: Path) -> tuple[list[str], str]:
    """Of one server, in each layout; and its log."""
    server = Server("mpirun", 2, ["--engine", str(engine), *FLAGS])
    try:
        server.wait_until_ready()
        found = []
        for name in ("tp", "dp", "cp", "dop"):
            reply = server.ask("POST", "/v1/layout", {"layout": name, "pin": True})
            assert reply.status == 200, reply.data
            body = {"model": "splash-tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
            reply = server.ask("POST", "/v1/completions", body)
            assert reply.status == 200, reply.data
            found.append(reply.json["choices"][0]["text"])
            wait_until(lambda name=name: server.ask("GET", "/v1/layout").json["status"]["layout"] == name, 120, name)
        return found, server.log
    finally:
        server.close()


def test_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_engine(MODEL, tmp_path / "splash-tiny")
    expected, log = answers(tmp_path / "splash-tiny")
    assert "evaluator" not in log
    assert len(set(expected)) == 1 and len(expected[0]) > 20
    monkeypatch.setattr(servers, "SPLASH", [sys.executable, str(PROGRAM), str(MODEL), "float64"])
    found, log = answers(tmp_path / "splash-tiny")
    assert found == expected
    assert all(f"evaluator: lowers {kind}" in log for kind in ("attention_in", "moe", "attend_absorbed", "head"))
